// Handlers made from a function of one lane: unary<D, A, f> runs d = f(a) over the lanes of a warp.
#pragma once

#include "decoder.h"
#include "lanes.h"
#include "warp.h"

namespace gpusim {

template <class D, class A, auto F>
void unary(Warp& w, const Op& op, Mask m) {
  map_lanes(m, F, w.reg<D>(op.d), w.reg<A>(op.a));
}

template <class D, class A, class B, auto F>
void binary(Warp& w, const Op& op, Mask m) {
  map_lanes(m, F, w.reg<D>(op.d), w.reg<A>(op.a), w.reg<B>(op.b));
}

template <class D, class A, class B, class C, auto F>
void ternary(Warp& w, const Op& op, Mask m) {
  map_lanes(m, F, w.reg<D>(op.d), w.reg<A>(op.a), w.reg<B>(op.b), w.reg<C>(op.c));
}

// Calls f.operator()<T>() with the C++ type of an integer type of PTX; null for other types.
template <class F>
Handler for_integer(Type type, F f) {
  switch (type) {
    case Type::u16:
    case Type::b16: return f.template operator()<std::uint16_t>();
    case Type::s16: return f.template operator()<std::int16_t>();
    case Type::u32:
    case Type::b32: return f.template operator()<std::uint32_t>();
    case Type::s32: return f.template operator()<std::int32_t>();
    case Type::u64:
    case Type::b64: return f.template operator()<std::uint64_t>();
    case Type::s64: return f.template operator()<std::int64_t>();
    default: return nullptr;
  }
}

// Calls f.operator()<U>() with an unsigned type of this many bytes.
template <class F>
Handler for_width(int bytes, F f) {
  switch (bytes) {
    case 2: return f.template operator()<std::uint16_t>();
    case 4: return f.template operator()<std::uint32_t>();
    case 8: return f.template operator()<std::uint64_t>();
    default: return nullptr;
  }
}

// Sets the slots of d, a, b, c for an instruction whose operands all have the same width.
inline void same_width_operands(Decoder& d, int width) {
  d.op.d = d.dest(0, width);
  if (d.operand_count() > 1) d.op.a = d.source(1, width);
  if (d.operand_count() > 2) d.op.b = d.source(2, width);
  if (d.operand_count() > 3) d.op.c = d.source(3, width);
}

}  // namespace gpusim
