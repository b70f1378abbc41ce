// Integer arithmetic.
#include <bit>
#include <limits>

#include "handlers.h"

namespace gpusim {

namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
struct Twice;
template <>
struct Twice<std::uint16_t> {
  using type = std::uint32_t;
};
template <>
struct Twice<std::int16_t> {
  using type = std::int32_t;
};
template <>
struct Twice<std::uint32_t> {
  using type = std::uint64_t;
};
template <>
struct Twice<std::int32_t> {
  using type = std::int64_t;
};
template <>
struct Twice<std::uint64_t> {
  using type = unsigned __int128;
};
template <>
struct Twice<std::int64_t> {
  using type = __int128;
};
template <class T>
using Wide = typename Twice<T>::type;

template <class T>
T wrap_add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
T wrap_sub(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
T low_product(T a, T b) {
  return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}
template <class T>
T high_product(T a, T b) {
  return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
}

// Division by zero gives all ones, the remainder the dividend.
template <class T>
T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrap_sub<T>(0, a);
  return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

std::int32_t saturating(std::int64_t v) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(std::max<std::int64_t>(v, INT32_MIN), INT32_MAX));
}

// add, sub, with the carry flag read and written
template <class T, bool Subtract, bool Read, bool Write>
void carry_arithmetic(Warp& w, const Op& op, Mask m) {
  const T* a = w.reg<T>(op.a);
  const T* b = w.reg<T>(op.b);
  T* d = w.reg<T>(op.d);
  for_each_lane(m, [&](int l) {
    const unsigned in = Read ? w.carry >> l & 1 : Subtract ? 1u : 0u;  // subtraction: carry means no borrow
    const T other = Subtract ? static_cast<T>(~b[l]) : b[l];
    const auto sum = static_cast<unsigned __int128>(a[l]) + other + in;
    d[l] = static_cast<T>(sum);
    if (Write) w.carry = (w.carry & ~(1u << l)) | static_cast<Mask>((sum >> (8 * sizeof(T))) & 1) << l;
  });
}

template <class T, bool High, bool Read, bool Write>
void carry_multiply_add(Warp& w, const Op& op, Mask m) {
  const T* a = w.reg<T>(op.a);
  const T* b = w.reg<T>(op.b);
  const T* c = w.reg<T>(op.c);
  T* d = w.reg<T>(op.d);
  for_each_lane(m, [&](int l) {
    const T product = High ? high_product<T>(a[l], b[l]) : low_product<T>(a[l], b[l]);
    const auto sum = static_cast<unsigned __int128>(static_cast<Unsigned<T>>(product)) +
                     static_cast<Unsigned<T>>(c[l]) + (Read ? w.carry >> l & 1 : 0u);
    d[l] = static_cast<T>(sum);
    if (Write) w.carry = (w.carry & ~(1u << l)) | static_cast<Mask>((sum >> (8 * sizeof(T))) & 1) << l;
  });
}

template <bool Subtract>
void select_add(Decoder& d) {
  const std::string name = d.opcode();
  const bool reads = name == "addc" || name == "subc";
  const bool writes = d.take("cc");
  const bool saturate = d.take("sat");
  const Type type = d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, width_of(type));
  if (reads || writes) {
    d.op.run = for_width(width_of(type), [&]<class T>() -> Handler {
      if (reads && writes) return carry_arithmetic<T, Subtract, true, true>;
      if (reads) return carry_arithmetic<T, Subtract, true, false>;
      return carry_arithmetic<T, Subtract, false, true>;
    });
  } else if (saturate) {
    d.op.run = binary<std::int32_t, std::int32_t, std::int32_t, [](std::int32_t a, std::int32_t b) {
      return saturating(Subtract ? std::int64_t{a} - b : std::int64_t{a} + b);
    }>;
  } else {
    d.op.run = for_width(width_of(type), []<class T>() -> Handler {
      return binary < T, T, T, Subtract ? wrap_sub<T> : wrap_add < T >> ;
    });
  }
}

template <class T, bool Add>
Handler product_handler(std::string_view part) {
  if (part == "wide") {
    if constexpr (sizeof(T) < 8) {
      using W = Wide<T>;
      if constexpr (Add)
        return ternary<W, T, T, W, [](T a, T b, W c) {
          return static_cast<W>(static_cast<Unsigned<W>>(W{a} * W{b}) + static_cast<Unsigned<W>>(c));
        }>;
      else
        return binary<W, T, T, [](T a, T b) { return static_cast<W>(W{a} * W{b}); }>;
    }
    return nullptr;
  }
  if (part == "hi") {
    if constexpr (Add)
      return ternary<T, T, T, T, [](T a, T b, T c) { return wrap_add<T>(high_product<T>(a, b), c); }>;
    else
      return binary<T, T, T, high_product<T>>;
  }
  if constexpr (Add)
    return ternary<T, T, T, T, [](T a, T b, T c) { return wrap_add<T>(low_product<T>(a, b), c); }>;
  else
    return binary<T, T, T, low_product<T>>;
}

template <bool Add>
void select_mul(Decoder& d) {
  const bool reads = d.opcode() == "madc";
  const bool writes = d.take("cc");
  const std::string_view part = d.take_any({"lo", "hi", "wide"});
  const Type type = d.take_type();
  const int width = width_of(type);
  d.kind = Class::integer;
  d.op.d = d.dest(0, part == "wide" ? 2 * width : width);
  d.op.a = d.source(1, width);
  d.op.b = d.source(2, width);
  if (Add) d.op.c = d.source(3, part == "wide" ? 2 * width : width);
  if (reads || writes) {
    d.op.run = for_integer(type, [&]<class T>() -> Handler {
      const bool high = part == "hi";
      if (reads && writes)
        return high ? carry_multiply_add<T, true, true, true> : carry_multiply_add<T, false, true, true>;
      if (reads) return high ? carry_multiply_add<T, true, true, false> : carry_multiply_add<T, false, true, false>;
      return high ? carry_multiply_add<T, true, false, true> : carry_multiply_add<T, false, false, true>;
    });
    return;
  }
  d.op.run = for_integer(type, [&]<class T>() -> Handler { return product_handler<T, Add>(part); });
  if (!d.op.run) d.fail("this multiplication is not known to the simulator");
}

// One result from operands of the instruction's type.
template <class Make>
void select_simple(Decoder& d, Make make) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, width_of(type));
  d.op.run = for_integer(type, make);
}

void select_div(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return binary<T, T, T, quotient<T>>; });
}
void select_rem(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return binary<T, T, T, remainder<T>>; });
}
void select_abs(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return unary<T, T, [](T a) { return a < 0 ? wrap_sub<T>(0, a) : a; }>; });
}
void select_neg(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return unary<T, T, [](T a) { return wrap_sub<T>(0, a); }>; });
}
void select_min(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return binary<T, T, T, [](T a, T b) { return a < b ? a : b; }>; });
}
void select_max(Decoder& d) {
  select_simple(d, []<class T>() -> Handler { return binary<T, T, T, [](T a, T b) { return (a > b) ? a : b; }>; });
}
void select_sad(Decoder& d) {
  select_simple(d, []<class T>() -> Handler {
    return ternary<T, T, T, T,
                   [](T a, T b, T c) { return wrap_add<T>(c, a < b ? wrap_sub<T>(b, a) : wrap_sub<T>(a, b)); }>;
  });
}

// Results of 32 bits whatever the operand.
template <class Make>
void select_count(Decoder& d, Make make) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  d.op.d = d.dest(0, 4);
  d.op.a = d.source(1, type);
  d.op.run = for_integer(type, make);
}

void select_popc(Decoder& d) {
  select_count(d, []<class T>() -> Handler {
    return unary<std::uint32_t, T,
                 [](T a) { return static_cast<std::uint32_t>(std::popcount(static_cast<Unsigned<T>>(a))); }>;
  });
}
void select_clz(Decoder& d) {
  select_count(d, []<class T>() -> Handler {
    return unary<std::uint32_t, T,
                 [](T a) { return static_cast<std::uint32_t>(std::countl_zero(static_cast<Unsigned<T>>(a))); }>;
  });
}

template <class T, bool Shift>
std::uint32_t find_bit(T a) {
  if (std::is_signed_v<T> && a < 0) a = static_cast<T>(~a);
  if (a == 0) return 0xffffffffu;
  const int position = 8 * int{sizeof(T)} - 1 - std::countl_zero(static_cast<Unsigned<T>>(a));
  return static_cast<std::uint32_t>(Shift ? 8 * int{sizeof(T)} - 1 - position : position);
}
void select_bfind(Decoder& d) {
  if (d.take("shiftamt"))
    select_count(d, []<class T>() -> Handler { return unary<std::uint32_t, T, find_bit<T, true>>; });
  else
    select_count(d, []<class T>() -> Handler { return unary<std::uint32_t, T, find_bit<T, false>>; });
}

template <class T>
T reverse(T a) {
  T r = 0;
  for (std::size_t i = 0; i < 8 * sizeof(T); ++i) r |= ((a >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return r;
}
void select_brev(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, width_of(type));
  d.op.run = width_of(type) == 8 ? unary<std::uint64_t, std::uint64_t, reverse<std::uint64_t>>
                                 : unary<std::uint32_t, std::uint32_t, reverse<std::uint32_t>>;
}

template <class T>
T extract(T a, std::uint32_t position, std::uint32_t length) {
  constexpr int bits = 8 * sizeof(T);
  const int pos = position & 0xff, len = length & 0xff;
  const auto u = static_cast<Unsigned<T>>(a);
  const int sign_at = std::min(pos + len - 1, bits - 1);
  const bool negative = std::is_signed_v<T> && len > 0 && (u >> sign_at & 1);
  Unsigned<T> field = pos < bits ? u >> pos : 0;
  const int have = std::min(len, std::max(bits - pos, 0));
  if (have < bits) field &= (Unsigned<T>{1} << have) - 1;
  if (negative && have < bits) field |= ~((Unsigned<T>{1} << have) - 1);
  return static_cast<T>(field);
}
void select_bfe(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, 4);
  d.op.c = d.source(3, 4);
  d.op.run =
      for_integer(type, []<class T>() -> Handler { return ternary<T, T, std::uint32_t, std::uint32_t, extract<T>>; });
}

template <class T>
void insert_field(Warp& w, const Op& op, Mask m) {
  constexpr int bits = 8 * sizeof(T);
  const T* a = w.reg<T>(op.a);
  const T* b = w.reg<T>(op.b);
  const auto* position = w.reg<std::uint32_t>(op.c);
  const auto* length = w.reg<std::uint32_t>(op.list[0]);
  T* d = w.reg<T>(op.d);
  for_each_lane(m, [&](int l) {
    const int pos = position[l] & 0xff, len = std::min<int>(length[l] & 0xff, bits);
    T result = b[l];
    for (int i = 0; i < len && pos + i < bits; ++i) {
      const T bit = T{1} << (pos + i);
      result = (result & ~bit) | (((a[l] >> i) & 1) << (pos + i));
    }
    d[l] = result;
  });
}
void select_bfi(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, type);
  d.op.c = d.source(3, 4);
  d.op.list = d.list({d.source(4, 4)});
  d.op.run = width_of(type) == 8 ? insert_field<std::uint64_t> : insert_field<std::uint32_t>;
}

template <class A, class B>
std::uint32_t dot4(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t sum = c;
  for (int i = 0; i < 4; ++i)
    sum += static_cast<std::uint32_t>(static_cast<A>(a >> (8 * i)) * static_cast<B>(b >> (8 * i)));
  return sum;
}
void select_dp4a(Decoder& d) {
  const bool sa = is_signed(d.take_type()), sb = d.has_type() ? is_signed(d.take_type()) : sa;
  d.kind = Class::integer;
  same_width_operands(d, 4);
  using U = std::uint32_t;
  if (sa && sb)
    d.op.run = ternary<U, U, U, U, dot4<std::int8_t, std::int8_t>>;
  else if (sa)
    d.op.run = ternary<U, U, U, U, dot4<std::int8_t, std::uint8_t>>;
  else if (sb)
    d.op.run = ternary<U, U, U, U, dot4<std::uint8_t, std::int8_t>>;
  else
    d.op.run = ternary<U, U, U, U, dot4<std::uint8_t, std::uint8_t>>;
}

}  // namespace

void integer_arithmetic(Decoder& d) {
  static const InstructionTable table = {
      {"add", select_add<false>}, {"sub", select_add<true>}, {"mul", select_mul<false>},
      {"mad", select_mul<true>},  {"div", select_div},       {"abs", select_abs},
      {"neg", select_neg},        {"min", select_min},       {"max", select_max}};
  const auto found = table.find(d.opcode());
  if (found == table.end()) d.fail("not an integer instruction");
  found->second(d);
}

void add_integer(InstructionTable& t) {
  t["addc"] = select_add<false>;
  t["subc"] = select_add<true>;
  t["madc"] = select_mul<true>;
  t["rem"] = select_rem;
  t["sad"] = select_sad;
  t["popc"] = select_popc;
  t["clz"] = select_clz;
  t["bfind"] = select_bfind;
  t["brev"] = select_brev;
  t["bfe"] = select_bfe;
  t["bfi"] = select_bfi;
  t["dp4a"] = select_dp4a;
}

}  // namespace gpusim
