#include "register_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>

#include "decoder.h"

namespace gpusim {

namespace {

using Set = std::vector<std::uint64_t>;  // of registers, one bit each

// Operations that run one after the other: entered at the first, left after the last.
struct Stretch {
  std::uint32_t first, last;
  std::vector<std::size_t> next;
  Set reads, writes;  // read before any write; certainly written
  Set in, out;        // alive before and after
};

bool jumps(const Op& op) { return op.run == branch_always || op.run == branch_if_equal; }

std::vector<Stretch> find_stretches(const std::vector<Op>& code) {
  std::vector<bool> begins(code.size() + 1);
  begins[0] = true;
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (jumps(code[i])) begins[static_cast<std::size_t>(code[i].imm)] = begins[i + 1] = true;
  }
  std::vector<Stretch> stretches;
  std::vector<std::size_t> index(code.size() + 1);
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (begins[i]) stretches.emplace_back().first = static_cast<std::uint32_t>(i);
    index[i] = stretches.size() - 1;
    stretches.back().last = static_cast<std::uint32_t>(i);
  }
  for (std::size_t s = 0; s < stretches.size(); ++s) {
    const Op& op = code[stretches[s].last];
    if (jumps(op) && static_cast<std::size_t>(op.imm) < code.size())
      stretches[s].next.push_back(index[static_cast<std::size_t>(op.imm)]);
    const bool always = op.run == branch_always && op.guard == 0;
    if (!always && s + 1 < stretches.size()) stretches[s].next.push_back(s + 1);
  }
  return stretches;
}

void find_reads_and_writes(const Program& program, const RegisterLog& log, std::vector<Stretch>& stretches) {
  const std::size_t words = (log.widths.size() + 63) / 64;
  std::size_t t = 0;
  for (Stretch& s : stretches) {
    for (Set* set : {&s.reads, &s.writes, &s.in, &s.out}) set->assign(words, 0);
    while (t < log.touches.size() && log.touches[t].op <= s.last) {
      const std::size_t begin = t;
      const std::uint32_t op = log.touches[t].op;
      for (; t < log.touches.size() && log.touches[t].op == op; ++t) {
        const auto [_, id, written] = log.touches[t];
        if (!written && !(s.writes[id / 64] >> id % 64 & 1)) s.reads[id / 64] |= 1ull << id % 64;
      }
      if (program.code[op].guard != 0) continue;  // not written by every lane
      for (std::size_t i = begin; i < t; ++i) {
        const auto [_, id, written] = log.touches[i];
        if (written) s.writes[id / 64] |= 1ull << id % 64;
      }
    }
  }
}

void find_what_is_alive(std::vector<Stretch>& stretches) {
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = stretches.size(); i-- > 0;) {
      Stretch& s = stretches[i];
      for (const std::size_t n : s.next) {
        for (std::size_t w = 0; w < s.out.size(); ++w) s.out[w] |= stretches[n].in[w];
      }
      for (std::size_t w = 0; w < s.out.size(); ++w) {
        const std::uint64_t in = s.reads[w] | (s.out[w] & ~s.writes[w]);
        changed |= in != s.in[w];
        s.in[w] = in;
      }
    }
  }
}

// Registers of wgmma, and those they are copied from or to.
std::vector<bool> find_alone(const RegisterLog& log) {
  std::vector<bool> alone = log.alone;
  if (std::find(alone.begin(), alone.end(), true) == alone.end()) return alone;
  for (bool grown = true; grown;) {
    grown = false;
    for (const auto [a, b] : log.copies) {
      grown |= alone[a] != alone[b];
      if (alone[a] != alone[b]) alone[a] = alone[b] = true;
    }
  }
  return alone;
}

template <class F>
void for_each_member(const Set& set, F f) {
  for (std::size_t w = 0; w < set.size(); ++w) {
    for (std::uint64_t bits = set[w]; bits; bits &= bits - 1) f(w * 64 + std::countr_zero(bits));
  }
}

}  // namespace

RegisterPlan plan_registers(const Program& program, const RegisterLog& log, Slot begin) {
  std::vector<Stretch> stretches = find_stretches(program.code);
  find_reads_and_writes(program, log, stretches);
  find_what_is_alive(stretches);

  // From the first to the last operation where a register is alive, holes included.
  const std::size_t count = log.widths.size();
  std::vector<std::uint32_t> first(count, ~0u), last(count, 0);
  const auto extend = [&](std::size_t id, std::uint32_t op) {
    first[id] = std::min(first[id], op);
    last[id] = std::max(last[id], op);
  };
  for (const auto& touch : log.touches) extend(touch.id, touch.op);
  for (const Stretch& s : stretches) {
    for_each_member(s.in, [&](std::size_t id) { extend(id, s.first); });
    for_each_member(s.out, [&](std::size_t id) { extend(id, s.last); });
  }

  // In the order in which they begin, each takes the slot that became free last: its row is in the cache. Nobody gets
  // a slot at the operation where another ends, so that no instruction overwrites an operand. What is alive at the
  // start is read before it is written, and finds the zeros of a slot nobody had before.
  const std::vector<bool> alone = find_alone(log);
  RegisterPlan plan{std::vector<Slot>(count, begin), begin};
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return first[a] < first[b]; });
  std::multimap<std::uint32_t, std::size_t> alive;  // by their last operation
  std::map<int, std::vector<Slot>> free;            // by width
  for (const std::size_t id : order) {
    while (!alive.empty() && alive.begin()->first < first[id]) {
      const std::size_t ended = alive.begin()->second;
      free[log.widths[ended]].push_back(plan.slots[ended]);
      alive.erase(alive.begin());
    }
    auto& slots = free[log.widths[id]];
    if (slots.empty() || alone[id]) {
      plan.slots[id] = plan.end;
      plan.end += static_cast<Slot>(kLanes * log.widths[id]);
    } else {
      plan.slots[id] = slots.back();
      slots.pop_back();
    }
    if (!alone[id]) alive.emplace(last[id], id);
  }
  return plan;
}

}  // namespace gpusim
