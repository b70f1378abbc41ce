// What goes wrong: a Fault is raised by an instruction, and becomes an Error once kernel, block, warp and line are
// added.
#pragma once

#include <stdexcept>
#include <string>

namespace gpusim {

struct Fault {
  int lane;  // -1: the whole warp
  std::string message;
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... T>
std::string text(const T&... parts);

std::string hex(unsigned long long value);

}  // namespace gpusim

#include <sstream>

namespace gpusim {

template <class... T>
std::string text(const T&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

inline std::string hex(unsigned long long value) {
  std::ostringstream stream;
  stream << "0x" << std::hex << value;
  return stream.str();
}

}  // namespace gpusim
