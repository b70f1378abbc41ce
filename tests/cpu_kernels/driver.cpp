// Runs the kernels of one target without torch: reads calls from standard input, writes what they computed to standard
// output, until the input ends.
//
// A call is made of lines, and so is a tensor's head, whose bytes follow it:
//
//   number NAME VALUE
//   input NAME BYTES     memory that the kernels read
//   output NAME BYTES    memory that they write, whose bytes are the answer: in the order of these lines
//   forward, or backward
//
// Nothing lies behind the last byte of a tensor: with AddressSanitizer its redzone, else a page without access. What
// was never written reads as NaN: memory is filled with ones, for the kernels' own as well. Every call has new threads
// and so a new scratch.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "cpu/backward_plan.h"
#include "cpu/work_plan.h"
#include "params.h"

namespace {

void* filled(void* memory, size_t bytes) {
  if (!memory) std::abort();
  return std::memset(memory, 0xFF, bytes);
}

}  // namespace

void* operator new(size_t bytes) { return filled(std::malloc(bytes), bytes); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<size_t>(alignment), bytes) != 0) std::abort();
  return filled(memory, bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using namespace mha_ext;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "driver: %s\n", message.c_str());
  std::exit(2);
}

// A tensor's memory, and nothing behind it.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
#if defined(__SANITIZE_ADDRESS__)
    data_ = static_cast<char*>(filled(std::malloc(bytes), bytes));
#else
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), room = (bytes + page - 1) / page * page;
    mapped_ = room + page;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED || mprotect(static_cast<char*>(map_) + room, page, PROT_NONE) != 0) fail("no memory");
    data_ = static_cast<char*>(filled(map_, room)) + room - bytes;
#endif
  }
  ~Memory() {
#if defined(__SANITIZE_ADDRESS__)
    std::free(data_);
#else
    munmap(map_, mapped_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  char* data_;
#if !defined(__SANITIZE_ADDRESS__)
  void* map_;
  size_t mapped_;
#endif
};

struct Floats : Memory {
  explicit Floats(int64_t count) : Memory(count * sizeof(float)) {}
  float* data() const { return reinterpret_cast<float*>(Memory::data()); }
};

struct Call {
  std::string kind;
  std::map<std::string, std::string> numbers;
  std::map<std::string, std::unique_ptr<Memory>> tensors;
  std::vector<std::string> outputs;

  const std::string& text(const std::string& name) const {
    const auto found = numbers.find(name);
    if (found == numbers.end()) fail("no number " + name);
    return found->second;
  }
  int64_t integer(const std::string& name) const { return std::strtoll(text(name).c_str(), nullptr, 10); }
  int small(const std::string& name) const { return static_cast<int>(integer(name)); }
  double real(const std::string& name) const { return std::strtod(text(name).c_str(), nullptr); }

  template <typename T>
  T* tensor(const std::string& name) const {  // null where the call has none
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : reinterpret_cast<T*>(found->second->data());
  }
  Strides3 strides3(const std::string& name) const {
    return {integer(name + ".batch"), integer(name + ".head"), integer(name + ".row")};
  }
};

// False at the end of the input.
bool read_call(Call& call) {
  char line[256], kind[16], name[64], value[64];
  while (std::fgets(line, sizeof(line), stdin)) {
    const int words = std::sscanf(line, "%15s %63s %63s", kind, name, value);
    if (words == 1) {
      call.kind = kind;
      return true;
    }
    if (words != 3) fail(std::string("cannot read ") + line);
    if (std::strcmp(kind, "number") == 0) {
      call.numbers[name] = value;
      continue;
    }
    const size_t bytes = std::strtoull(value, nullptr, 10);
    const auto& memory = call.tensors[name] = std::make_unique<Memory>(bytes);
    if (std::strcmp(kind, "output") == 0) {
      call.outputs.push_back(name);
    } else if (std::fread(memory->data(), 1, bytes, stdin) != bytes) {
      fail(std::string("too few bytes of ") + name);
    }
  }
  return false;
}

AttentionParams params_of(const Call& call) {
  AttentionParams p = {};
  p.query = call.tensor<void>("query");
  p.key = call.tensor<void>("key");
  p.value = call.tensor<void>("value");
  p.output = call.tensor<void>("output");
  p.query_strides = call.strides3("query");
  p.key_strides = call.strides3("key");
  p.value_strides = call.strides3("value");
  p.output_strides = call.strides3("output");
  p.lse = call.tensor<float>("lse");
  p.row_stats = call.tensor<float>("row_stats");
  p.max_score = call.tensor<float>("max_score");
  p.entropy = call.tensor<float>("entropy");
  p.row_batch_stride = call.integer("rows.batch");
  p.row_head_stride = call.integer("rows.head");
  p.cu_seqlens_q = call.tensor<int32_t>("cu_seqlens_q");
  p.cu_seqlens_k = call.tensor<int32_t>("cu_seqlens_k");
  p.batch = call.integer("batch");
  p.seqlen_q = call.integer("seqlen_q");
  p.seqlen_kv = call.integer("seqlen_kv");
  p.num_heads_q = call.small("num_heads_q");
  p.num_heads_kv = call.small("num_heads_kv");
  p.head_dim = call.small("head_dim");
  p.head_dim_v = call.small("head_dim_v");
  p.scale = static_cast<float>(call.real("scale"));
  p.dtype = static_cast<DType>(call.small("dtype"));

  ScoreRuleParams& rule = p.rule;
  rule.attn_mask = call.tensor<void>("attn_mask");
  if (rule.attn_mask) {
    const Strides3 outer = call.strides3("attn_mask");
    rule.mask_strides = {outer.batch, outer.head, outer.row, call.integer("attn_mask.col")};
    rule.mask_dtype = static_cast<DType>(call.small("attn_mask.dtype"));
  }
  rule.key_lengths = call.tensor<int64_t>("key_lengths");
  rule.q_offsets = call.tensor<int64_t>("q_offsets");
  rule.alibi_slopes = call.tensor<void>("alibi_slopes");
  if (rule.alibi_slopes) {
    rule.alibi_batch_stride = call.integer("alibi_slopes.batch");
    rule.alibi_head_stride = call.integer("alibi_slopes.head");
  }
  rule.sinks = call.tensor<void>("sinks");
  rule.q_offset = call.integer("q_offset");
  rule.window_left = call.integer("window_left");
  rule.window_right = call.integer("window_right");
  rule.softcap = call.real("softcap");

  p.dropout.rng_state = call.tensor<int64_t>("rng_state");
  if (p.dropout.rng_state) {
    p.dropout.threshold = static_cast<uint32_t>(call.integer("threshold"));
    p.dropout.drop_all = call.integer("drop_all") != 0;
    p.dropout.keep_scale = call.real("keep_scale");
  }
  return p;
}

// Calls work(i, thread) for each i below count, in the next thread that is free.
template <typename Work>
void in_threads(int threads, int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      for (int64_t i = next++; i < count; i = next++) work(i, t);
    });
  }
  for (std::thread& thread : running) thread.join();
}

void forward(const Call& call) {
  const cpu::Kernels& kernels = cpu::MHA_TEST_TARGET::kKernels;
  const AttentionParams params = params_of(call);
  const int threads = call.small("threads");
  cpu::WorkPlan plan = cpu::plan_tiles(params);
  plan.splits = call.small("splits");
  std::unique_ptr<Floats> partial;
  if (plan.splits > 1) {
    constexpr int kPartialHead = 3;
    plan.partial_stride = kPartialHead + params.head_dim_v;
    partial = std::make_unique<Floats>(plan.units() * plan.max_rows * plan.partial_stride);
    plan.partial = partial->data();
  }
  const Floats packed(kernels.packed_values_size ? kernels.packed_values_size(params) : 0);
  if (packed.bytes() > 0) {
    plan.packed_values = packed.data();
    in_threads(threads, params.batch * params.num_heads_kv,
               [&](int64_t head, int) { kernels.pack_values(params, packed.data(), head); });
  }
  in_threads(threads, plan.units(), [&](int64_t unit, int) { kernels.run_unit(params, plan, unit); });
  if (plan.splits > 1) {
    in_threads(threads, plan.tiles, [&](int64_t tile, int) { kernels.merge_splits(params, plan, tile); });
  }
}

// `parts` tensors of a gradient that the kernels add to, one behind the other.
struct Parts {
  int64_t count, each;
  Floats memory;

  Parts(int64_t count, int64_t each) : count(count), each(each), memory(count * each) {
    std::fill(memory.data(), memory.data() + count * each, 0.f);
  }
  void add_up(float* to, int64_t part_stride, int64_t stride) const {
    for (int64_t i = 0; i < each; ++i) {
      double sum = 0;
      for (int64_t part = 0; part < count; ++part) sum += memory.data()[part * part_stride + i * stride];
      to[i] = static_cast<float>(sum);
    }
  }
};

void backward(const Call& call) {
  const cpu::Kernels& kernels = cpu::MHA_TEST_TARGET::kKernels;
  AttentionBackwardParams params = {};
  params.forward = params_of(call);
  const AttentionParams& forward = params.forward;
  const int threads = call.small("threads");
  params.grad_output = call.tensor<void>("grad_output");
  params.grad_output_strides = call.strides3("grad_output");
  params.grad_lse = call.tensor<float>("grad_lse");
  params.grad_query = call.tensor<void>("grad_query");
  params.grad_key = call.tensor<void>("grad_key");
  params.grad_value = call.tensor<void>("grad_value");
  params.grad_query_strides = call.strides3("grad_query");
  params.grad_key_strides = call.strides3("grad_key");
  params.grad_value_strides = call.strides3("grad_value");
  float* const grad_bias = call.tensor<float>("grad_bias");
  if (grad_bias) {
    params.bias_batch = call.integer("bias.batch");
    params.bias_heads = call.integer("bias.head");
    params.bias_rows = call.integer("bias.row");
  }
  cpu::BackwardPlan plan = cpu::plan_backward(params);

  std::unique_ptr<Parts> bias_parts, slope_parts;
  if (grad_bias) {
    const int64_t each = params.bias_batch * params.bias_heads * params.bias_rows * forward.seqlen_kv;
    bias_parts = std::make_unique<Parts>(plan.bias_parts, each);
    params.grad_bias = bias_parts->memory.data();
  }
  float* const grad_slopes = call.tensor<float>("grad_slopes");
  if (grad_slopes) {
    slope_parts = std::make_unique<Parts>(plan.runs, forward.batch * forward.num_heads_q);
    params.grad_slopes = slope_parts->memory.data();
    params.slope_partials = plan.runs;
  }
  params.grad_sink_rows = call.tensor<float>("grad_sink_rows");

  const int64_t rows = (forward.cu_seqlens_q ? 1 : forward.batch) * forward.num_heads_q * forward.seqlen_q;
  const Floats query_parts(plan.runs > 1 ? plan.runs * rows * forward.head_dim : 0);
  if (plan.runs > 1) plan.query_parts = query_parts.data();
  std::vector<std::unique_ptr<Floats>> own;
  for (int t = 0; t < threads; ++t) own.push_back(std::make_unique<Floats>(plan.accumulator_floats));
  in_threads(threads, plan.items(), [&](int64_t item, int t) {
    kernels.run_backward_item(params, plan, item, plan.accumulator_floats ? own[t]->data() : nullptr);
  });
  if (plan.runs > 1) {
    in_threads(threads, plan.queries.tiles, [&](int64_t tile, int) { kernels.add_query_parts(params, plan, tile); });
  }
  if (grad_bias) bias_parts->add_up(grad_bias, bias_parts->each, 1);
  if (grad_slopes) slope_parts->add_up(grad_slopes, 1, plan.runs);
}

}  // namespace

int main() {
  for (;;) {
    Call call;
    if (!read_call(call)) return 0;
    if (call.kind == "forward") {
      forward(call);
    } else {
      backward(call);
    }
    std::fputs("done\n", stdout);
    for (const std::string& name : call.outputs) {
      const Memory& memory = *call.tensors.at(name);
      std::fwrite(memory.data(), 1, memory.bytes(), stdout);
    }
    std::fflush(stdout);
  }
}
