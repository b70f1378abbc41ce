#include "builtin.h"

#include <cstdio>
#include <cstring>
#include <mutex>

#include "access.h"
#include "block.h"
#include "lanes.h"

namespace gpusim {

namespace {

template <class T>
T parameter(Warp& warp, const Op& op, int index, int lane) {
  T value;
  const std::uint32_t place = warp.reg<std::uint32_t>(op.list[index])[lane];
  std::memcpy(&value, warp.local + std::size_t{warp.local_stride} * lane + place, sizeof value);
  return value;
}

// A string the kernel gave: read byte by byte, so that every byte is checked.
std::string read_text(Warp& warp, int lane, std::uint64_t address) {
  std::string result;
  while (const char c = static_cast<char>(
             *resolve_one(warp, lane, Space::generic, address + result.size(), 1, AccessKind::read))) {
    result += c;
  }
  return result;
}

template <class T>
T read_argument(Warp& warp, int lane, std::uint64_t& address) {
  address = (address + sizeof(T) - 1) / sizeof(T) * sizeof(T);
  T value;
  std::memcpy(&value, resolve_one(warp, lane, Space::generic, address, sizeof(T), AccessKind::read), sizeof value);
  address += sizeof(T);
  return value;
}

std::string format(Warp& warp, int lane, const std::string& pattern, std::uint64_t arguments) {
  std::string result;
  char buffer[512];
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '%') {
      result += pattern[i];
      continue;
    }
    std::string spec = "%";
    for (++i; i < pattern.size() && std::strchr("-+ #0123456789.hlLzjt*", pattern[i]); ++i) {
      if (pattern[i] == '*')
        spec += std::to_string(read_argument<std::int32_t>(warp, lane, arguments));
      else
        spec += pattern[i];
    }
    if (i >= pattern.size()) break;
    const char type = pattern[i];
    const bool wide = spec.find('l') != std::string::npos || spec.find('z') != std::string::npos ||
                      spec.find('j') != std::string::npos;
    spec += type;
    if (type == '%') {
      result += '%';
      continue;
    }
    if (type == 's') {
      std::snprintf(buffer, sizeof buffer, spec.c_str(),
                    read_text(warp, lane, read_argument<std::uint64_t>(warp, lane, arguments)).c_str());
    } else if (std::strchr("fFeEgGaA", type)) {
      std::snprintf(buffer, sizeof buffer, spec.c_str(), read_argument<double>(warp, lane, arguments));
    } else if (wide || type == 'p') {
      std::snprintf(buffer, sizeof buffer, spec.c_str(), read_argument<std::uint64_t>(warp, lane, arguments));
    } else {
      std::snprintf(buffer, sizeof buffer, spec.c_str(), read_argument<std::uint32_t>(warp, lane, arguments));
    }
    result += buffer;
  }
  return result;
}

// vprintf(format, arguments) -> number
void print(Warp& warp, const Op& op, Mask m) {
  static std::mutex mutex;
  for_each_lane(m, [&](int l) {
    const std::string pattern = read_text(warp, l, parameter<std::uint64_t>(warp, op, 1, l));
    const std::string line = format(warp, l, pattern, parameter<std::uint64_t>(warp, op, 2, l));
    const std::lock_guard lock(mutex);
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  });
}

// __assertfail(message, file, line, function, character size)
void assert_failed(Warp& warp, const Op& op, Mask m) {
  const int l = __builtin_ctz(m);
  const std::string message = read_text(warp, l, parameter<std::uint64_t>(warp, op, 0, l));
  const std::string file = read_text(warp, l, parameter<std::uint64_t>(warp, op, 1, l));
  throw Fault{l, text("assertion '", message, "' failed at ", file, ":", parameter<std::uint32_t>(warp, op, 2, l))};
}

}  // namespace

Handler find_builtin(const std::string& name) {
  if (name == "vprintf") return print;
  if (name == "__assertfail") return assert_failed;
  return nullptr;
}

}  // namespace gpusim
