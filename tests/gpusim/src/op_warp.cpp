// Exchange between the lanes of a warp: shfl, vote, match, redux, elect, activemask, bar.warp.
#include <map>

#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

// Calls f(lanes) for the lanes of a .sync instruction; lanes with different member masks (tiles of a warp) form groups
// of their own. All live members must be here, and whoever is here must be a member.
template <class F>
void for_members(Warp& w, Slot slot, Mask m, F f) {
  const auto* masks = w.reg<std::uint32_t>(slot);
  Mask all = 0;
  for_each_lane(m, [&](int l) { all |= masks[l]; });
  if (!w.gather(all)) return;
  for (Mask rest = m; rest;) {
    const int first = __builtin_ctz(rest);
    const Mask members = masks[first];
    const auto refuse = [&](Mask who, const char* why) {
      throw Fault{__builtin_ctz(who), text("lane ", __builtin_ctz(who), why, hex(members))};
    };
    if (!(members >> first & 1)) refuse(1u << first, " is not in its own member mask ");
    if (const Mask absent = members & w.live & ~m)
      refuse(absent, " does not execute the instruction, but is in the member mask ");
    f(rest & members);
    rest &= ~members;
  }
}

enum class Shuffle { up, down, bfly, idx };

template <Shuffle S>
void shuffle_lanes(Warp& w, const Op& op, Mask m) {
  std::uint32_t from[kLanes];
  std::memcpy(from, w.reg<std::uint32_t>(op.a), sizeof from);
  const auto* b = w.reg<std::uint32_t>(op.b);
  const auto* c = w.reg<std::uint32_t>(op.c);
  auto* d = w.reg<std::uint32_t>(op.d);
  Mask valid = 0;
  for_each_lane(m, [&](int l) {
    const int clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
    const int max_lane = (l & segment) | (clamp & ~segment), min_lane = l & segment;
    int j = 0;
    bool ok = false;
    switch (S) {
      case Shuffle::up:
        j = l - by;
        ok = j >= max_lane;
        break;
      case Shuffle::down:
        j = l + by;
        ok = j <= max_lane;
        break;
      case Shuffle::bfly:
        j = l ^ by;
        ok = j <= max_lane;
        break;
      case Shuffle::idx:
        j = min_lane | (by & ~segment);
        ok = j <= max_lane;
        break;
    }
    if (!ok) j = l;
    if (!(m >> j & 1)) throw Fault{l, text("shfl reads lane ", j, ", which does not take part")};
    d[l] = from[j];
    valid |= static_cast<Mask>(ok) << l;
  });
  Mask& p = w.pred(op.list[1]);
  p = (p & ~m) | valid;
}

// The usual butterfly: all lanes, the same distance, no segments.
bool plain_butterfly(Warp& w, const Op& op) {
  const auto* b = w.reg<std::uint32_t>(op.b);
  const auto* c = w.reg<std::uint32_t>(op.c);
  const auto* members = w.reg<std::uint32_t>(op.list[0]);
  std::uint32_t different = 0;
  for (int l = 0; l < kLanes; ++l) different |= (b[l] ^ b[0]) | ((c[l] & 0x1f1f) ^ 0x1f) | ~members[l];
  return different == 0;
}

template <Shuffle S>
void shuffle(Warp& w, const Op& op, Mask m) {
  if (S == Shuffle::bfly && m == kAllLanes && plain_butterfly(w, op)) {
    std::uint32_t from[kLanes];
    std::memcpy(from, w.reg<std::uint32_t>(op.a), sizeof from);
    const std::uint32_t by = w.reg<std::uint32_t>(op.b)[0] & 31;
    auto* d = w.reg<std::uint32_t>(op.d);
    for (std::uint32_t l = 0; l < kLanes; ++l) d[l] = from[l ^ by];
    w.pred(op.list[1]) = kAllLanes;
    return;
  }
  for_members(w, op.list[0], m, [&](Mask group) { shuffle_lanes<S>(w, op, group); });
}

void select_shfl(Decoder& d) {
  d.take("sync");
  const std::string_view mode = d.take_any({"up", "down", "bfly", "idx"});
  d.take_type();
  d.kind = Class::exchange;
  d.op.d = d.dest(0, 4);
  d.op.a = d.source(1, 4);
  d.op.b = d.source(2, 4);
  d.op.c = d.source(3, 4);
  d.op.list = d.list({d.source(4, 4), d.predicate(d.operand(0).second)});
  d.op.run = mode == "up"     ? shuffle<Shuffle::up>
             : mode == "down" ? shuffle<Shuffle::down>
             : mode == "bfly" ? shuffle<Shuffle::bfly>
                              : shuffle<Shuffle::idx>;
}

// op.mode: 0 ballot, 1 all, 2 any, 3 uni
void vote_lanes(Warp& w, const Op& op, Mask m) {
  const Mask p = (w.pred(op.a) ^ static_cast<Mask>(op.imm)) & m;
  if (op.mode == 0) {
    for_each_lane(m, [&](int l) { w.reg<std::uint32_t>(op.d)[l] = p; });
    return;
  }
  const bool result = op.mode == 1 ? p == m : op.mode == 2 ? p != 0 : p == m || p == 0;
  Mask& d = w.pred(op.d);
  d = result ? d | m : d & ~m;
}

void vote(Warp& w, const Op& op, Mask m) {
  for_members(w, op.b, m, [&](Mask group) { vote_lanes(w, op, group); });
}

void select_vote(Decoder& d) {
  d.take("sync");
  const std::string_view mode = d.take_any({"ballot", "all", "any", "uni"});
  d.take_type();
  d.kind = Class::exchange;
  d.op.mode = mode == "ballot" ? 0 : mode == "all" ? 1 : mode == "any" ? 2 : 3;
  d.op.d = mode == "ballot" ? d.dest(0, 4) : d.predicate(d.operand(0).name);
  d.op.a = d.source(d.operand(1), 1);
  d.op.imm = d.operand(1).negated ? -1 : 0;
  d.op.b = d.source(2, 4);
  d.op.run = vote;
}

template <class T, bool All>
void match_lanes(Warp& w, const Op& op, Mask m) {
  const T* a = w.reg<T>(op.a);
  std::map<T, Mask> same;
  for_each_lane(m, [&](int l) { same[a[l]] |= 1u << l; });
  auto* d = w.reg<std::uint32_t>(op.d);
  for_each_lane(m, [&](int l) { d[l] = All ? (same.size() == 1 ? m : 0) : same[a[l]]; });
  Mask& p = w.pred(op.c);
  p = All && same.size() == 1 ? p | m : p & ~m;
}

template <class T, bool All>
void match(Warp& w, const Op& op, Mask m) {
  for_members(w, op.b, m, [&](Mask group) { match_lanes<T, All>(w, op, group); });
}

void select_match(Decoder& d) {
  const bool all = d.take_any({"any", "all"}) == "all";
  d.take("sync");
  const Type type = d.take_type();
  d.kind = Class::exchange;
  d.op.d = d.dest(0, 4);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, 4);
  d.op.c = d.predicate(d.operand(0).second);
  if (width_of(type) == 8)
    d.op.run = all ? match<std::uint64_t, true> : match<std::uint64_t, false>;
  else
    d.op.run = all ? match<std::uint32_t, true> : match<std::uint32_t, false>;
}

template <class T, auto F>
void reduce(Warp& w, const Op& op, Mask m) {
  for_members(w, op.b, m, [&](Mask group) {
    const T* a = w.reg<T>(op.a);
    T result = a[__builtin_ctz(group)];
    for_each_lane(group & (group - 1), [&](int l) { result = F(result, a[l]); });
    for_each_lane(group, [&](int l) { w.reg<T>(op.d)[l] = result; });
  });
}

void select_redux(Decoder& d) {
  d.take("sync");
  const std::string_view what = d.take_any({"add", "min", "max", "and", "or", "xor"});
  const Type type = d.take_type();
  d.kind = Class::exchange;
  d.op.d = d.dest(0, 4);
  d.op.a = d.source(1, 4);
  d.op.b = d.source(2, 4);
  using U = std::uint32_t;
  using I = std::int32_t;
  const bool is_s = type == Type::s32;
  if (what == "add")
    d.op.run = reduce<U, [](U a, U b) { return a + b; }>;
  else if (what == "and")
    d.op.run = reduce<U, [](U a, U b) { return a & b; }>;
  else if (what == "or")
    d.op.run = reduce<U, [](U a, U b) { return a | b; }>;
  else if (what == "xor")
    d.op.run = reduce<U, [](U a, U b) { return a ^ b; }>;
  else if (what == "min")
    d.op.run =
        is_s ? reduce<I, [](I a, I b) { return a < b ? a : b; }> : reduce<U, [](U a, U b) { return a < b ? a : b; }>;
  else
    d.op.run = is_s ? reduce<I, [](I a, I b) { return (a > b) ? a : b; }>
                    : reduce<U, [](U a, U b) { return (a > b) ? a : b; }>;
  if (type != Type::s32 && type != Type::u32 && type != Type::b32)
    d.fail("redux of this type is not known to the simulator");
}

// elect.sync d|p, mask: the lowest member.
void elect(Warp& w, const Op& op, Mask m) {
  for_members(w, op.a, m, [&](Mask group) {
    const int leader = __builtin_ctz(group);
    for_each_lane(group, [&](int l) { w.reg<std::uint32_t>(op.d)[l] = leader; });
    Mask& p = w.pred(op.b);
    p = (p & ~group) | (1u << leader);
  });
}

void select_elect(Decoder& d) {
  d.take("sync");
  d.kind = Class::exchange;
  d.op.d = d.dest(0, 4);
  d.op.b = d.predicate(d.operand(0).second);
  d.op.a = d.source(1, 4);
  d.op.run = elect;
}

void active_mask(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) { w.reg<std::uint32_t>(op.d)[l] = m; });
}

void select_activemask(Decoder& d) {
  d.take_type();
  d.kind = Class::exchange;
  d.op.d = d.dest(0, 4);
  d.op.run = active_mask;
}

}  // namespace

void warp_sync(Warp& w, const Op& op, Mask m) {
  for_members(w, op.a, m, [&](Mask group) {
    if (w.block->shadow) w.block->shadow->synchronize_lanes(w, group);
  });
}

void add_warp(InstructionTable& t) {
  t["shfl"] = select_shfl;
  t["vote"] = select_vote;
  t["match"] = select_match;
  t["redux"] = select_redux;
  t["elect"] = select_elect;
  t["activemask"] = select_activemask;
}

}  // namespace gpusim
