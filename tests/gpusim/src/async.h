// Asynchronous copies in flight.
#pragma once

#include "decoder.h"
#include "warp.h"

namespace gpusim {

// Lands all copies of these lanes but those of their newest `newer_groups_left` groups.
void complete_copies(Warp& warp, Mask lanes, std::uint32_t newer_groups_left);

void commit_copies(Warp& warp, const Op& op, Mask m);
void wait_copies(Warp& warp, const Op& op, Mask m);
void wait_all_copies(Warp& warp, const Op& op, Mask m);

struct MBarrier;
MBarrier& find_mbarrier(Warp& warp, int lane, std::uint64_t address);
void arrive_at(Block& block, int lane, MBarrier& barrier, std::uint32_t arrivals);
void complete_bytes(Block& block, int lane, MBarrier& barrier, std::int64_t bytes);
// The barriers that these lanes initialised may be completed by the asynchronous proxy.
void fence_initializations(Warp& warp, Mask m);
// What is missing before the current phase is over, for a report.
std::string describe_mbarrier(Block& block, std::uint32_t address);

// Families with the same first word, in files of their own.
void select_bulk(Decoder& d);
void select_setmaxnreg(Decoder& d);
void select_cp_async_mbarrier(Decoder& d);
void select_red_async(Decoder& d);

}  // namespace gpusim
