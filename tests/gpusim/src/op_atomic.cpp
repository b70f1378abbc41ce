// atom and red: read-modify-write of one element, in a loop of compare-and-swap on the host.
#include <bit>

#include "access.h"
#include "async.h"
#include "atomic.h"
#include "float_math.h"
#include "handlers.h"

namespace gpusim {

namespace {

template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
std::uint64_t to_bits(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T, auto F>
std::uint64_t modify(std::uint64_t old, std::uint64_t b, std::uint64_t) {
  return to_bits<T>(F(from_bits<T>(old), from_bits<T>(b)));
}

template <class H, auto F>
std::uint64_t modify_half(std::uint64_t old, std::uint64_t b, std::uint64_t) {
  const H x{static_cast<std::uint16_t>(old)}, y{static_cast<std::uint16_t>(b)};
  return from_double<H>(F(to_float(x), to_float(y)), Rounding::nearest_even).bits;
}
template <class H, auto F>
std::uint64_t modify_pair(std::uint64_t old, std::uint64_t b, std::uint64_t c) {
  return modify_half<H, F>(old, b, c) | modify_half<H, F>(old >> 16, b >> 16, c) << 16;
}

template <class T>
T plus(T a, T b) {
  return static_cast<T>(a + b);
}
template <class T>
T lower(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T higher(T a, T b) {
  return a > b ? a : b;
}
double half_plus(float a, float b) { return add_to_odd(a, b); }
double half_lower(float a, float b) { return min_number(a, b); }
double half_higher(float a, float b) { return max_number(a, b); }

template <class H, bool Pair>
Modify half_modify(std::string_view name) {
  if constexpr (Pair)
    return name == "add"   ? modify_pair<H, half_plus>
           : name == "min" ? modify_pair<H, half_lower>
                           : modify_pair<H, half_higher>;
  else
    return name == "add"   ? modify_half<H, half_plus>
           : name == "min" ? modify_half<H, half_lower>
                           : modify_half<H, half_higher>;
}

template <class T>
Modify number_modify(std::string_view name) {
  return name == "add" ? modify<T, plus<T>> : name == "min" ? modify<T, lower<T>> : modify<T, higher<T>>;
}

}  // namespace

Modify find_modify(std::string_view name, Type type) {
  if (name == "exch") return [](std::uint64_t, std::uint64_t b, std::uint64_t) { return b; };
  if (name == "cas") return [](std::uint64_t old, std::uint64_t b, std::uint64_t c) { return old == b ? c : old; };
  if (name == "and") return [](std::uint64_t old, std::uint64_t b, std::uint64_t) { return old & b; };
  if (name == "or") return [](std::uint64_t old, std::uint64_t b, std::uint64_t) { return old | b; };
  if (name == "xor") return [](std::uint64_t old, std::uint64_t b, std::uint64_t) { return old ^ b; };
  if (name == "inc") return [](std::uint64_t old, std::uint64_t b, std::uint64_t) { return old >= b ? 0 : old + 1; };
  if (name == "dec")
    return [](std::uint64_t old, std::uint64_t b, std::uint64_t) { return old == 0 || old > b ? b : old - 1; };
  if (name != "add" && name != "min" && name != "max") return nullptr;
  switch (type) {
    case Type::u32: return number_modify<std::uint32_t>(name);
    case Type::s32: return number_modify<std::int32_t>(name);
    case Type::u64: return number_modify<std::uint64_t>(name);
    case Type::s64: return number_modify<std::int64_t>(name);
    case Type::f32: return number_modify<float>(name);
    case Type::f64: return number_modify<double>(name);
    case Type::f16: return half_modify<Half, false>(name);
    case Type::bf16: return half_modify<BFloat, false>(name);
    case Type::f16x2: return half_modify<Half, true>(name);
    case Type::bf16x2: return half_modify<BFloat, true>(name);
    default: return nullptr;
  }
}

namespace {

// op.list: destinations (none for red), then values; op.data: the function; op.flags bit 0: returns the old value
template <class T>
void atomic(Warp& w, const Op& op, Mask m) {
  Pointers p;
  operand_pointers(w, op, m, sizeof(T) * op.count, AccessKind::atomic, p);
  const auto f = reinterpret_cast<Modify>(op.data);
  const bool returns = op.flags & 1;
  const Slot* d = op.list;
  const Slot* b = op.list + (returns ? op.count : 0);
  const T* c = w.reg<T>(op.c);
  for (int e = 0; e < op.count; ++e) {
    const T* values = w.reg<T>(b[e]);
    for_each_lane(m, [&](int l) {
      T* at = reinterpret_cast<T*>(p[l]) + e;
      const T old = modify_atomically(at, f, values[l], c[l]);
      if (returns) w.reg<T>(d[e])[l] = old;
    });
  }
}

template <bool Returns>
void select_atomic(Decoder& d) {
  if (!Returns && d.take("async")) return select_red_async(d);
  d.take_cache_hints();
  d.ignore({"relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "cluster", "noftz"});
  d.op.space = take_space(d);
  const std::string_view vector = d.take_any({"v2", "v4", "v8"});
  const std::string_view name = d.take_any({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
  const Type type = d.take_type();
  const int width = width_of(type);
  d.kind = Class::atomic;
  const Modify f = find_modify(name, type);
  if (!f || width > 8) d.fail("this atomic operation is not known to the simulator");
  d.op.count = vector.empty() ? 1 : static_cast<std::uint8_t>(vector[1] - '0');
  d.op.flags = Returns | kOpSynchronizing;
  d.op.size = static_cast<std::uint8_t>(width);
  d.op.data = reinterpret_cast<const void*>(f);
  const std::size_t first = Returns ? 1 : 0;
  d.address(first);
  std::vector<Slot> slots;
  if (Returns) {
    for (const ptx::Operand* part : d.elements(0)) slots.push_back(d.dest(part->name, width));
  }
  for (const ptx::Operand* part : d.elements(first + 1)) slots.push_back(d.source(*part, width));
  d.op.list = d.list(slots);
  d.op.c = name == "cas" ? d.source(first + 2, width) : d.constant(0, width);
  d.op.run = for_width(width, []<class T>() -> Handler { return atomic<T>; });
}

}  // namespace

void add_atomic(InstructionTable& t) {
  t["atom"] = select_atomic<true>;
  t["red"] = select_atomic<false>;
}

}  // namespace gpusim
