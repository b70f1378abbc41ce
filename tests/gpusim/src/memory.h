// Which host memory a kernel may touch: the blocks that were registered with their exact sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpusim {

void register_memory(const void* start, std::size_t bytes, const char* name = "");
void unregister_memory(const void* start);

// True when [start, start + bytes) lies in one registered block.
bool memory_allowed(std::uint64_t start, std::size_t bytes);

// Says which block is nearest to a refused address.
std::string describe_memory(std::uint64_t address);

}  // namespace gpusim
