"""Which tiles a tile visits: csrc/attention/key_range.h, compiled by the host compiler, against counting."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

# Random rules: prints what is wrong, and in the end how many were looked at.
PROGRAM = r"""
#include <cstdio>
#include <random>
#include "attention/key_range.h"
using namespace mha_ext;

int main() {
  std::mt19937 random(0);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int rules = 0;
  for (; rules < 50000; ++rules) {
    const int seqlen_q = draw(1, 20), seqlen_kv = draw(0, 20);
    const int64_t far[] = {kMaxAxis, -kMaxAxis, int64_t{1} << 40, -(int64_t{1} << 40)};
    int64_t key_length = draw(-2, 22), q_offset = draw(0, 9) ? draw(-20, 20) : far[draw(0, 3)];
    ScoreRuleParams params = {};
    if (draw(0, 1)) params.key_lengths = &key_length;
    params.q_offset = q_offset;
    if (draw(0, 1)) params.q_offsets = &q_offset;
    params.window_left = draw(0, 9) ? draw(-1, 6) : int64_t{1} << 50;
    params.window_right = draw(0, 9) ? draw(-1, 6) : int64_t{1} << 50;
    const auto sees = [&](int i, int j) {
      return j < seqlen_kv && row_rule<float>(params, 0, 0, i, seqlen_kv).in_bounds(j);
    };

    const int first_query = draw(0, seqlen_q - 1), last_query = draw(first_query, seqlen_q - 1);
    const Band band = score_band(params, 0, first_query, seqlen_kv);
    const VisibleRange keys = visible_keys(band, last_query - first_query + 1);
    for (int j = 0; j < seqlen_kv; ++j) {
      bool some = false, all = true;
      for (int i = first_query; i <= last_query; ++i) {
        if (sees(i, j) != band.in_bounds(i - first_query, j)) std::printf("band: query %d, key %d\n", i, j);
        some |= sees(i, j);
        all &= sees(i, j);
      }
      if (some != (j >= keys.begin && j < keys.end)) std::printf("keys: %d\n", j);
      if (all != (j >= keys.full_begin && j < keys.full_end)) std::printf("full keys: %d\n", j);
    }
    const int block = draw(1, 7);
    for (int tile = 0; tile * block < seqlen_kv; ++tile) {
      bool some = false, all = true;
      for (int j = tile * block; j < (tile + 1) * block; ++j) {
        for (int i = first_query; i <= last_query; ++i) {
          some |= sees(i, j);
          all &= sees(i, j);
        }
      }
      const bool visited = !keys.empty() && tile >= keys.first_tile(block) && tile < keys.end_tile(block);
      if (some != visited) std::printf("tile %d of %d\n", tile, block);
      if (all != (visited && keys.is_full(tile, block))) std::printf("full tile %d of %d\n", tile, block);
    }

    const int first_key = draw(0, 20), last_key = draw(first_key, 22);
    const VisibleRange queries =
        visible_queries(score_band(params, 0, 0, seqlen_kv), first_key, last_key, seqlen_q);
    for (int i = 0; i < seqlen_q; ++i) {
      bool some = false, all = true;
      for (int j = first_key; j <= last_key; ++j) {
        some |= sees(i, j);
        all &= sees(i, j);
      }
      if (some != (i >= queries.begin && i < queries.end)) std::printf("queries: %d\n", i);
      if (all != (i >= queries.full_begin && i < queries.full_end)) std::printf("full queries: %d\n", i);
    }
  }
  std::printf("%d rules\n", rules);
}
"""


def test_ranges_are_what_counting_finds(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "ranges.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-O1", f"-I{CSRC}", str(tmp_path / "ranges.cpp"), "-o", str(tmp_path / "ranges")]
    subprocess.run(command, check=True)
    printed = subprocess.run([tmp_path / "ranges"], check=True, capture_output=True, text=True).stdout
    assert printed == "50000 rules\n"
