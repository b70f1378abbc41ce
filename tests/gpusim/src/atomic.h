// What atom, red and bulk reductions do to one element.
#pragma once

#include <cstdint>
#include <string_view>

#include "decoder.h"

namespace gpusim {

// New value from the old one and the operands, all as bits.
using Modify = std::uint64_t (*)(std::uint64_t old, std::uint64_t b, std::uint64_t c);

// The function of an operation's name and type; null for what there is not.
Modify find_modify(std::string_view name, Type type);

// Other host threads may run blocks that modify the same place. Gives the old value.
template <class T>
T modify_atomically(T* at, Modify f, T b, T c) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED), wanted;
  do wanted = static_cast<T>(f(old, b, c));
  while (!__atomic_compare_exchange_n(at, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return old;
}

}  // namespace gpusim
