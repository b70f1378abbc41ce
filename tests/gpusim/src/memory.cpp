#include "memory.h"

#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "fault.h"

namespace gpusim {

namespace {

struct Region {
  std::uint64_t end;
  std::string name;
};

struct Registry {
  std::shared_mutex mutex;
  std::map<std::uint64_t, Region> regions;   // by start
  std::atomic<std::uint64_t> generation{1};  // grows when a block is taken away
};

Registry& registry() {
  static Registry* instance = new Registry;  // outlives every static destructor that may free memory
  return *instance;
}

struct Last {
  std::uint64_t generation = 0, start = 1, end = 0;
};
constexpr int kOverlaps = 16;
// The blocks found last on this thread: a kernel touches few.
thread_local Last recent[8];

// Without start + bytes, which may pass 2^64.
bool inside(std::uint64_t start, std::size_t bytes, std::uint64_t end) { return start <= end && bytes <= end - start; }

}  // namespace

void register_memory(const void* start, std::size_t bytes, const char* name) {
  if (bytes == 0) return;
  Registry& r = registry();
  const auto address = reinterpret_cast<std::uint64_t>(start);
  const std::unique_lock lock(r.mutex);
  r.regions[address] = {address + bytes, name};
  ++r.generation;
}

void unregister_memory(const void* start) {
  Registry& r = registry();
  const std::unique_lock lock(r.mutex);
  if (r.regions.erase(reinterpret_cast<std::uint64_t>(start))) ++r.generation;
}

bool memory_allowed(std::uint64_t start, std::size_t bytes) {
  Registry& r = registry();
  const std::uint64_t generation = r.generation.load(std::memory_order_acquire);
  for (const Last& last : recent) {
    if (last.generation == generation && start >= last.start && inside(start, bytes, last.end)) return true;
  }
  const std::shared_lock lock(r.mutex);
  auto found = r.regions.upper_bound(start);
  for (int back = 0;; ++back) {  // blocks may overlap: a view that was registered inside another
    if (found == r.regions.begin() || back == kOverlaps) return false;
    --found;
    if (inside(start, bytes, found->second.end)) break;
  }
  static thread_local unsigned turn = 0;
  recent[turn++ % 8] = {generation, found->first, found->second.end};
  return true;
}

std::string describe_memory(std::uint64_t address) {
  Registry& r = registry();
  const std::shared_lock lock(r.mutex);
  const auto block_of = [](std::uint64_t start, const Region& region) {
    return text("a block of ", region.end - start, " bytes", region.name.empty() ? "" : " (" + region.name + ")");
  };
  std::string result;
  auto next = r.regions.upper_bound(address);
  if (next != r.regions.begin()) {
    const auto& [start, region] = *std::prev(next);
    if (address < region.end)
      return text("at byte ", address - start, " of ", block_of(start, region), ", which it passes");
    result = text(address - region.end, " bytes after the end of ", block_of(start, region));
  }
  if (next != r.regions.end() && (result.empty() || next->first - address < 4096)) {
    result +=
        text(result.empty() ? "" : ", ", next->first - address, " bytes before ", block_of(next->first, next->second));
  }
  return result.empty() ? "no memory is registered" : result;
}

}  // namespace gpusim
