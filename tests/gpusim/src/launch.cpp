#include "launch.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <thread>

#include "block.h"
#include "fault.h"
#include "module.h"

namespace gpusim {

namespace {

// A block that did not end within so many operations lets the next one run, so that blocks may wait for each other.
constexpr std::uint64_t kBlockTurn = 1u << 21;
constexpr std::size_t kRecords = 100000;

std::mutex records_mutex;
std::deque<LaunchRecord> records;

void check(const Launch& launch) {
  const auto refuse = [&](const std::string& why) { throw Error("kernel " + launch.program->name + ": " + why); };
  const int threads = launch.threads_per_block();
  if (threads < 1 || threads > 1024) refuse(text("a block of ", threads, " threads (1 to 1024)"));
  if (const int exact = launch.program->exact_threads; exact && threads != exact)
    refuse(text("a block of ", threads, " threads, but the kernel was compiled for exactly ", exact));
  const bool bounded = launch.program->bounded_threads || launch.program->max_registers;
  if (!bounded && threads * kMostRegisters > kRegistersPerBlock && launch.config.checks.launch_bounds) {
    refuse(text("a block of ", threads, " threads, but the kernel has no launch bounds: with up to ", kMostRegisters,
                " registers a thread, it may need more than the ", kRegistersPerBlock, " of a block"));
  }
  if (const int most = launch.program->max_registers; most * threads > kRegistersPerBlock) {
    refuse(text("a block of ", threads, " threads with ", most, " registers each (.maxnreg), a block has ",
                kRegistersPerBlock));
  }
  if (threads > launch.program->max_threads) {
    refuse(text("a block of ", threads, " threads, but the kernel was compiled for at most ",
                launch.program->max_threads));
  }
  if (launch.block[2] > 64) refuse(text("a block with z = ", launch.block[2], " (at most 64)"));
  if (launch.grid[0] > 0x7fffffffu || launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.blocks() == 0) {
    refuse(text("a grid of ", launch.grid[0], " x ", launch.grid[1], " x ", launch.grid[2], " blocks"));
  }
  const auto limit = static_cast<std::uint32_t>(shared_limit(launch.config.architecture));
  if (launch.shared_total() > limit) {
    refuse(text("needs ", launch.shared_total(), " bytes of shared memory, a block of sm_", launch.config.architecture,
                " has at most ", limit));
  }
}

template <class T>
void broadcast(std::byte* at, std::uint64_t bits) {
  const auto value = static_cast<T>(bits);
  for (int l = 0; l < kLanes; ++l) std::memcpy(at + l * sizeof(T), &value, sizeof(T));
}

void build_register_image(Launch& launch) {
  launch.register_image.assign(launch.program->register_bytes, std::byte{0});
  for (const Constant& constant : launch.program->constants) {
    std::byte* at = launch.register_image.data() + constant.slot;
    switch (constant.width) {
      case 1: {
        const auto mask = static_cast<Mask>(constant.bits);
        std::memcpy(at, &mask, sizeof mask);
        break;
      }
      case 2: broadcast<std::uint16_t>(at, constant.bits); break;
      case 4: broadcast<std::uint32_t>(at, constant.bits); break;
      default: broadcast<std::uint64_t>(at, constant.bits);
    }
  }
}

// Shared by the threads that run one launch.
struct Run {
  explicit Run(Launch& l) : launch(l), executed(l.program->code.size()) {}

  Launch& launch;
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;
  Counters counters;
  std::vector<std::uint64_t> executed;

  void worker() {
    Counters mine;
    std::vector<std::uint64_t> mine_executed(launch.program->code.size());
    std::deque<std::unique_ptr<Block>> running;
    std::vector<std::unique_ptr<Block>> idle;
    try {
      while (!failed) {
        if (const std::uint64_t index = next.fetch_add(1); index < launch.blocks()) {
          if (idle.empty()) idle.push_back(std::make_unique<Block>(launch, mine, mine_executed.data()));
          running.push_front(std::move(idle.back()));
          idle.pop_back();
          running.front()->start(index);
        } else if (running.empty()) {
          break;
        }
        std::unique_ptr<Block> block = std::move(running.front());
        running.pop_front();
        if (block->run(kBlockTurn))
          idle.push_back(std::move(block));
        else
          running.push_back(std::move(block));
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      failed = true;
    }
    const std::lock_guard lock(mutex);
    counters.add(mine);
    for (std::size_t i = 0; i < executed.size(); ++i) executed[i] += mine_executed[i];
  }
};

}  // namespace

void run_launch(Launch& launch) {
  check(launch);
  build_register_image(launch);
  const auto begin = std::chrono::steady_clock::now();
  Run run(launch);
  const auto threads = static_cast<int>(std::min<std::uint64_t>(launch.config.threads, launch.blocks()));
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&run] { run.worker(); });
  run.worker();
  for (std::thread& helper : helpers) helper.join();
  if (run.error) std::rethrow_exception(run.error);

  LaunchRecord record;
  record.kernel = launch.program->name;
  std::copy(launch.grid, launch.grid + 3, record.grid);
  std::copy(launch.block, launch.block + 3, record.block);
  record.shared_bytes = launch.shared_total();
  record.local_bytes = launch.program->local_bytes;
  record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  record.counters = run.counters;
  for (std::size_t i = 0; i < run.executed.size(); ++i) {
    const OpInfo& info = launch.program->info[i];
    record.counters.by_class[static_cast<std::size_t>(info.kind)] += run.executed[i];
    record.counters.warp_instructions += run.executed[i];
    record.counters.tensor_flops += run.executed[i] * info.tensor_flops;
  }
  const std::lock_guard lock(records_mutex);
  records.push_back(std::move(record));
  if (records.size() > kRecords) records.pop_front();
}

// As ptxas gives them to a kernel with setmaxnreg: .maxnreg, or as many as the launch bounds leave, in steps of 8.
int Launch::registers_per_thread() const {
  if (program->max_registers) return program->max_registers;
  if (!program->bounded_threads) return 0;
  return std::min(kRegistersPerBlock / (program->bounded_threads * program->min_blocks) / 8 * 8, kMostRegisters);
}

std::vector<LaunchRecord> launch_records() {
  const std::lock_guard lock(records_mutex);
  return {records.begin(), records.end()};
}

void clear_launch_records() {
  const std::lock_guard lock(records_mutex);
  records.clear();
}

Config& config() {
  static Config instance;
  return instance;
}

}  // namespace gpusim
