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
void arrive_at(Block& block, MBarrier& barrier, std::uint32_t arrivals);
void complete_bytes(Block& block, MBarrier& barrier, std::int64_t bytes);

// Families with the same first word, in files of their own.
void select_bulk(Decoder& d);
void select_cp_async_mbarrier(Decoder& d);
void select_red_async(Decoder& d);

}  // namespace gpusim
