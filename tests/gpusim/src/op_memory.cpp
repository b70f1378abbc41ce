// ld and st of all spaces and vector lengths, and prefetch.
#include "access.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

// All lanes side by side in memory, N elements each.
template <class T, int N>
void load_linear(Warp& w, const Slot* slots, const std::byte* from) {
  T values[kLanes * N];
  std::memcpy(values, from, sizeof values);
  for (int e = 0; e < N; ++e) {
    T* d = w.reg<T>(slots[e]);
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = values[l * N + e];
  }
}

template <class T, int N>
void store_linear(Warp& w, const Slot* slots, std::byte* to) {
  T values[kLanes * N];
  for (int e = 0; e < N; ++e) {
    const T* s = w.reg<T>(slots[e]);
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) values[l * N + e] = s[l];
  }
  std::memcpy(to, values, sizeof values);
}

// Calls f with the number of elements as a constant; false if there are none such.
template <class F>
bool with_count(int count, F f) {
  switch (count) {
    case 1: f.template operator()<1>(); return true;
    case 2: f.template operator()<2>(); return true;
    case 4: f.template operator()<4>(); return true;
    default: return false;
  }
}

// Register type R holds a memory element of type M, extended.
template <class M, class R>
void load(Warp& w, const Op& op, Mask m) {
  Pointers p;
  const bool linear = operand_pointers(w, op, m, sizeof(M) * op.count, AccessKind::read, p);
  const Slot* slots = op.count == 1 ? &op.d : op.list;
  if constexpr (std::is_same_v<M, R>) {
    if (linear && with_count(op.count, [&]<int N>() { load_linear<M, N>(w, slots, p[0]); })) return;
  }
  for (int e = 0; e < op.count; ++e) {
    R* d = w.reg<R>(slots[e]);
    for_each_lane(m, [&](int l) {
      M value;
      std::memcpy(&value, p[l] + e * sizeof(M), sizeof(M));
      d[l] = static_cast<R>(value);
    });
  }
}

// Parameters of the kernel: one address for all lanes.
template <class M, class R>
void load_parameter(Warp& w, const Op& op, Mask m) {
  const std::uint64_t* base = w.reg<std::uint64_t>(op.a);
  const auto* from = reinterpret_cast<const std::byte*>(base[__builtin_ctz(m)] + static_cast<std::uint64_t>(op.imm));
  const Slot* slots = op.count == 1 ? &op.d : op.list;
  for (int e = 0; e < op.count; ++e) {
    M value;
    std::memcpy(&value, from + e * sizeof(M), sizeof(M));
    R* d = w.reg<R>(slots[e]);
    for_each_lane(m, [&](int l) { d[l] = static_cast<R>(value); });
  }
}

// Several threads wrote here at the same time: fine if they all write the same value. What another lane writes by this
// very store is not in memory yet.
template <class M, class R>
void refuse_other_values(Warp& w, const Op& op, Mask m, const Slot* slots, const Pointers& p) {
  for_each_lane(w.contested, [&](int l) {
    int other = -1;
    for_each_lane(m & ((1u << l) - 1), [&](int k) {
      if (p[k] == p[l]) other = k;
    });
    for (int e = 0; e < op.count; ++e) {
      const auto value = [&](int lane) { return static_cast<M>(w.reg<R>(slots[e])[lane]); };
      const M mine = value(l), theirs = other < 0 ? mine : value(other);
      const void* there = other < 0 ? static_cast<const void*>(p[l] + e * sizeof(M)) : &theirs;
      if (std::memcmp(there, &mine, sizeof(M)) != 0)
        w.block->shadow->refuse_write(w, l, static_cast<std::uint32_t>(p[l] - w.block->shared));
    }
  });
}

template <class M, class R>
void store(Warp& w, const Op& op, Mask m) {
  Pointers p;
  const bool linear = operand_pointers(w, op, m, sizeof(M) * op.count, AccessKind::write, p);
  const Slot* slots = op.count == 1 ? &op.d : op.list;
  if (w.contested) refuse_other_values<M, R>(w, op, m, slots, p);
  if constexpr (std::is_same_v<M, R>) {
    if (linear && with_count(op.count, [&]<int N>() { store_linear<M, N>(w, slots, p[0]); })) return;
  }
  for (int e = 0; e < op.count; ++e) {
    const R* d = w.reg<R>(slots[e]);
    for_each_lane(m, [&](int l) {
      const M value = static_cast<M>(d[l]);
      std::memcpy(p[l] + e * sizeof(M), &value, sizeof(M));
    });
  }
}

struct Wide128 {
  std::uint64_t low, high;
};

enum class Way { load, store, parameter };

template <Way W, class M, class R>
Handler handler() {
  if constexpr (W == Way::load) return load<M, R>;
  if constexpr (W == Way::store) return store<M, R>;
  if constexpr (W == Way::parameter) return load_parameter<M, R>;
}

template <Way W, class M>
Handler for_register(int width) {
  switch (width) {
    case 2:
      if constexpr (sizeof(M) <= 2)
        return handler<W, M, std::uint16_t>();
      else
        return nullptr;
    case 4:
      if constexpr (sizeof(M) <= 4)
        return handler<W, M, std::uint32_t>();
      else
        return nullptr;
    case 8: return handler<W, M, std::uint64_t>();
    default: return nullptr;
  }
}

template <Way W>
Handler memory_handler(Type type, int width) {
  switch (type) {
    case Type::u8:
    case Type::b8: return for_register<W, std::uint8_t>(width);
    case Type::s8: return for_register<W, std::int8_t>(width);
    case Type::s16: return for_register<W, std::int16_t>(width);
    case Type::u16:
    case Type::b16:
    case Type::f16:
    case Type::bf16: return for_register<W, std::uint16_t>(width);
    case Type::s32: return for_register<W, std::int32_t>(width);
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64: return for_register<W, std::uint64_t>(width);
    case Type::b128: return width == 16 ? handler<W, Wide128, Wide128>() : nullptr;
    default: return for_register<W, std::uint32_t>(width);
  }
}

template <bool Store>
void select_memory(Decoder& d) {
  d.take_cache_hints();
  d.ignore({"weak", "gpu", "cta", "sys", "cluster", "nc", "unified"});
  if (!d.take_any({"volatile", "relaxed", "acquire", "release", "mmio"}).empty()) d.op.flags |= kOpSynchronizing;
  d.op.space = take_space(d);
  const std::string_view vector = d.take_any({"v2", "v4", "v8"});
  const Type type = d.take_type();
  const std::size_t address = Store ? 0 : 1, value = Store ? 1 : 0;
  d.address(address);
  d.op.size = static_cast<std::uint8_t>(width_of(type));
  d.op.count = vector.empty() ? 1 : static_cast<std::uint8_t>(vector[1] - '0');
  const auto parts = d.elements(value);
  if (parts.size() != d.op.count) d.fail("the vector has the wrong number of elements");
  int width = std::max(2, width_of(type));
  for (const ptx::Operand* part : parts) width = d.register_width(*part, width);
  std::vector<Slot> slots;
  for (const ptx::Operand* part : parts) slots.push_back(Store ? d.source(*part, width) : d.dest(part->name, width));
  d.op.d = slots[0];
  d.op.list = d.list(slots);
  const bool parameter = !Store && d.op.space == Space::param && !d.is_register(d.operand(address).name);
  d.op.run = parameter ? memory_handler<Way::parameter>(type, width)
                       : memory_handler<Store ? Way::store : Way::load>(type, width);
  if (!d.op.run) d.fail("a register of the wrong size");
  d.kind = d.op.space == Space::shared ? (Store ? Class::store_shared : Class::load_shared)
           : d.op.space == Space::global || d.op.space == Space::generic
               ? (Store ? Class::store_global : Class::load_global)
               : Class::other_memory;
}

void nothing(Warp&, const Op&, Mask) {}

void select_nothing(Decoder& d) {
  d.take_cache_hints();
  d.ignore({"global", "shared", "local", "generic", "const", "tensormap", "L1", "L2", "b8", "b64", "b32", "u64"});
  d.op.run = nothing;
  d.kind = Class::other_memory;
}

}  // namespace

Space take_space(Decoder& d) {
  const std::string_view name = d.take_any(
      {"global", "shared::cta", "shared::cluster", "shared", "local", "const", "param", "param::entry", "param::func"});
  if (name == "global") return Space::global;
  if (name.substr(0, 6) == "shared") return Space::shared;
  if (name == "local") return Space::local;
  if (name == "const") return Space::constant;
  if (name.substr(0, 5) == "param") return Space::param;
  return Space::generic;
}

void add_memory(InstructionTable& t) {
  t["ld"] = select_memory<false>;
  t["ldu"] = select_memory<false>;
  t["st"] = select_memory<true>;
  t["prefetch"] = select_nothing;
  t["prefetchu"] = select_nothing;
  t["applypriority"] = select_nothing;
  t["discard"] = select_nothing;
}

}  // namespace gpusim
