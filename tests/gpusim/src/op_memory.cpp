// ld and st of all spaces and vector lengths, prefetch and fences.
#include "access.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

// Register type R holds a memory element of type M, extended.
template <class M, class R>
void load(Warp& w, const Op& op, Mask m) {
  Pointers p;
  operand_pointers(w, op, m, sizeof(M) * op.count, AccessKind::read, p);
  const Slot* slots = op.count == 1 ? &op.d : op.list;
  for (int e = 0; e < op.count; ++e) {
    R* d = w.reg<R>(slots[e]);
    for_each_lane(m, [&](int l) {
      M value;
      std::memcpy(&value, p[l] + e * sizeof(M), sizeof(M));
      d[l] = static_cast<R>(value);
    });
  }
}

// Several threads wrote here at the same time: fine if they all write the same value.
template <class M, class R>
void refuse_other_values(Warp& w, const Op& op, const Slot* slots, const Pointers& p) {
  for_each_lane(w.contested, [&](int l) {
    for (int e = 0; e < op.count; ++e) {
      const M value = static_cast<M>(w.reg<R>(slots[e])[l]);
      const Mask earlier = (1u << l) - 1;
      bool same = std::memcmp(p[l] + e * sizeof(M), &value, sizeof(M)) == 0;
      // lanes of this very store that write the same place with the same value
      for_each_lane(earlier, [&](int k) {
        same |= p[k] == p[l] && std::memcmp(&w.reg<R>(slots[e])[k], &w.reg<R>(slots[e])[l], sizeof(R)) == 0;
      });
      if (!same) w.block->shadow->refuse_write(w, l, static_cast<std::uint32_t>(p[l] - w.block->shared));
    }
  });
}

template <class M, class R>
void store(Warp& w, const Op& op, Mask m) {
  Pointers p;
  operand_pointers(w, op, m, sizeof(M) * op.count, AccessKind::write, p);
  const Slot* slots = op.count == 1 ? &op.d : op.list;
  if (w.contested) refuse_other_values<M, R>(w, op, slots, p);
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

template <bool Store, class M>
Handler for_register(int width) {
  switch (width) {
    case 2:
      if constexpr (sizeof(M) <= 2)
        return Store ? store<M, std::uint16_t> : load<M, std::uint16_t>;
      else
        return nullptr;
    case 4:
      if constexpr (sizeof(M) <= 4)
        return Store ? store<M, std::uint32_t> : load<M, std::uint32_t>;
      else
        return nullptr;
    case 8: return Store ? store<M, std::uint64_t> : load<M, std::uint64_t>;
    default: return nullptr;
  }
}

template <bool Store>
Handler memory_handler(Type type, int width) {
  switch (type) {
    case Type::u8:
    case Type::b8: return for_register<Store, std::uint8_t>(width);
    case Type::s8: return for_register<Store, std::int8_t>(width);
    case Type::s16: return for_register<Store, std::int16_t>(width);
    case Type::u16:
    case Type::b16:
    case Type::f16:
    case Type::bf16: return for_register<Store, std::uint16_t>(width);
    case Type::s32: return for_register<Store, std::int32_t>(width);
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64: return for_register<Store, std::uint64_t>(width);
    case Type::b128: return width == 16 ? (Store ? store<Wide128, Wide128> : load<Wide128, Wide128>) : nullptr;
    default: return for_register<Store, std::uint32_t>(width);
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
  d.op.run = memory_handler<Store>(type, width);
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

void select_fence(Decoder& d) {
  d.ignore({"sc",
            "acq_rel",
            "acquire",
            "release",
            "cta",
            "gpu",
            "sys",
            "gl",
            "cluster",
            "proxy",
            "alias",
            "async",
            "shared::cta",
            "global",
            "mbarrier_init",
            "generic",
            "tensormap::generic",
            "async::generic",
            "sync_restrict::shared::cta",
            "sync_restrict::shared::cluster"});
  d.op.run = nothing;
  d.kind = Class::synchronization;
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
  t["membar"] = select_fence;
  t["fence"] = select_fence;
}

}  // namespace gpusim
