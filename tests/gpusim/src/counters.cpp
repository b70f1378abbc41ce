#include "counters.h"

#include <sstream>
#include <utility>

namespace gpusim {

namespace {

// Every number with its name: for adding and for JSON.
template <class C, class F>
void for_each_number(C& c, F f) {
  f("global_load_bytes", c.global_load_bytes);
  f("global_store_bytes", c.global_store_bytes);
  f("global_load_sectors", c.global_load_sectors);
  f("global_store_sectors", c.global_store_sectors);
  f("global_load_requests", c.global_load_requests);
  f("global_store_requests", c.global_store_requests);
  f("shared_load_requests", c.shared_load_requests);
  f("shared_store_requests", c.shared_store_requests);
  f("shared_load_wavefronts", c.shared_load_wavefronts);
  f("shared_store_wavefronts", c.shared_store_wavefronts);
  f("shared_load_ideal", c.shared_load_ideal);
  f("shared_store_ideal", c.shared_store_ideal);
  f("cp_async_bytes", c.cp_async_bytes);
  f("tma_bytes", c.tma_bytes);
  f("barriers", c.barriers);
  f("warp_instructions", c.warp_instructions);
  f("tensor_flops", c.tensor_flops);
}

}  // namespace

const char* class_name(Class c) {
  static const char* const names[] = {"integer",     "float32",          "float64",     "half",
                                      "conversion",  "special_function", "tensor_core", "move",
                                      "load_global", "store_global",     "load_shared", "store_shared",
                                      "matrix_load", "other_memory",     "atomic",      "async_copy",
                                      "control",     "synchronization",  "exchange"};
  return names[static_cast<std::size_t>(c)];
}

void Counters::add(const Counters& other) {
  std::vector<std::uint64_t> values;
  for_each_number(other, [&](const char*, std::uint64_t value) { values.push_back(value); });
  std::size_t i = 0;
  for_each_number(*this, [&](const char*, std::uint64_t& value) { value += values[i++]; });
  for (std::size_t k = 0; k < by_class.size(); ++k) by_class[k] += other.by_class[k];
}

std::string to_json(const LaunchRecord& r) {
  std::ostringstream out;
  out << "{\"kernel\": \"" << r.kernel << "\", \"grid\": [" << r.grid[0] << ", " << r.grid[1] << ", " << r.grid[2]
      << "], \"block\": [" << r.block[0] << ", " << r.block[1] << ", " << r.block[2]
      << "], \"shared_bytes\": " << r.shared_bytes << ", \"local_bytes\": " << r.local_bytes
      << ", \"seconds\": " << r.seconds;
  for_each_number(r.counters, [&](const char* name, std::uint64_t value) { out << ", \"" << name << "\": " << value; });
  out << ", \"instructions\": {";
  for (std::size_t i = 0; i < r.counters.by_class.size(); ++i) {
    out << (i ? ", " : "") << "\"" << class_name(static_cast<Class>(i)) << "\": " << r.counters.by_class[i];
  }
  out << "}}";
  return out.str();
}

}  // namespace gpusim
