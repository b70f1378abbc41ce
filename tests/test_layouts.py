"""Fragment layouts and swizzles of csrc/device, compiled by the host compiler and checked against their definition."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
LANES = range(32)
REGS = range(4)

PROGRAM = r"""
#include <cstdio>
#include "device/fragment.h"
#include "device/swizzle.h"
using namespace mha_ext;

template <Swizzle kSwizzle, int kRowBytes>
void print_swizzle(const char* name) {
  for (int row = 0; row < 16; ++row)
    for (int chunk = 0; chunk < kRowBytes / kChunkBytes; ++chunk)
      std::printf("%s %d %d %d %d\n", name, kRowBytes, row, chunk, swizzled_offset<kSwizzle, kRowBytes>(row, chunk));
}

template <Operand kOperand>
void print_fragment(const char* name) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      std::printf("%s_row %d %d %d\n", name, lane, reg, fragment_row<kOperand>(lane, reg));
      std::printf("%s_k2 %d %d %d\n", name, lane, reg, fragment_k<kOperand, 2>(lane, reg));
      std::printf("%s_k4 %d %d %d\n", name, lane, reg, fragment_k<kOperand, 4>(lane, reg));
    }
    std::printf("%s_ldmatrix_row %d %d\n", name, lane, ldmatrix_row<kOperand>(lane));
    std::printf("%s_ldmatrix_chunk %d %d\n", name, lane, ldmatrix_chunk<kOperand>(lane));
    std::printf("%s_ldmatrix_trans_k %d %d\n", name, lane, ldmatrix_trans_k<kOperand>(lane));
    std::printf("%s_ldmatrix_trans_chunk %d %d\n", name, lane, ldmatrix_trans_chunk<kOperand>(lane));
  }
}

int main() {
  print_swizzle<Swizzle::kChunkColumn, 32>("column");
  print_swizzle<Swizzle::kChunkColumn, 64>("column");
  print_swizzle<Swizzle::kChunkColumn, 128>("column");
  print_swizzle<Swizzle::kChunkColumn, 192>("column");
  print_swizzle<Swizzle::kChunkColumn, 256>("column");
  print_swizzle<Swizzle::kWordBlock, 128>("word");
  print_swizzle<Swizzle::kWordBlock, 256>("word");
  print_swizzle<Swizzle::kWordBlock, 512>("word");
  print_fragment<Operand::kA>("a");
  print_fragment<Operand::kB>("b");
  for (int lane = 0; lane < 32; ++lane)
    for (int reg = 0; reg < 4; ++reg) {
      std::printf("accumulator_row %d %d %d\n", lane, reg, accumulator_row(lane, reg));
      std::printf("accumulator_col %d %d %d\n", lane, reg, accumulator_col(lane, reg));
    }
  for (int lane = 0; lane < 32; ++lane) {
    std::printf("weighted_row %d %d\n", lane, weighted_row(lane));
    std::printf("weighted_col %d %d\n", lane, weighted_col(lane));
  }
  for (int reg = 0; reg < 4; ++reg) std::printf("weight_register %d %d\n", reg, weight_register(reg));
  for (int tile = 0; tile < 4; ++tile)
    for (int col = 0; col < 8; ++col)
      std::printf("weighted_out_col %d %d %d\n", tile, col, weighted_out_col(tile, col));
}
"""

Layouts = dict[tuple[str | int, ...], int]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """The value of every layout function for every argument: (name, *arguments) -> value."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "layouts.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", f"-I{CSRC}", str(folder / "layouts.cpp"), "-o", str(folder / "layouts")]
    subprocess.run(command, check=True)
    lines = subprocess.run([folder / "layouts"], check=True, capture_output=True, text=True).stdout.splitlines()
    table: Layouts = {}
    for name, *arguments, value in map(str.split, lines):
        table[(name, *map(int, arguments))] = int(value)
    return table


def wavefronts(addresses: Iterable[int], width: int) -> int:
    """How often 32 banks of 4 bytes must answer when each address asks for ``width`` bytes at once."""
    words = {address // 4 + i for address in addresses for i in range(width // 4)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


SWIZZLES = [("column", 32), ("column", 64), ("column", 128), ("column", 192), ("column", 256)]
SWIZZLES += [("word", 128), ("word", 256), ("word", 512)]


@pytest.mark.parametrize(("name", "row_bytes"), SWIZZLES)
def test_swizzle_permutes_chunks(layouts: Layouts, name: str, row_bytes: int) -> None:
    """Each row keeps its own chunks, every chunk has one place, and the pattern repeats after 8 rows."""
    for row in range(16):
        offsets = [layouts[name, row_bytes, row, chunk] for chunk in range(row_bytes // 16)]
        assert sorted(offsets) == list(range(row * row_bytes, (row + 1) * row_bytes, 16))
    for row, chunk in itertools.product(range(8), range(row_bytes // 16)):
        assert layouts[name, row_bytes, row + 8, chunk] == layouts[name, row_bytes, row, chunk] + 8 * row_bytes


@pytest.mark.parametrize(("name", "row_bytes"), SWIZZLES)
def test_swizzle_writes_without_conflicts(layouts: Layouts, name: str, row_bytes: int) -> None:
    """Eight neighbouring lanes of cp.async, eight chunks in reading order, fill one line."""
    chunks = [layouts[name, row_bytes, row, chunk] for row in range(16) for chunk in range(row_bytes // 16)]
    for first in range(0, len(chunks), 8):
        assert wavefronts(chunks[first : first + 8], 16) == 1


@pytest.mark.parametrize("row_bytes", [bytes_ for name, bytes_ in SWIZZLES if name == "column"])
def test_column_swizzle_reads_without_conflicts(layouts: Layouts, row_bytes: int) -> None:
    """One matrix of ldmatrix: the same chunk of eight rows."""
    for first, chunk in itertools.product((0, 8), range(row_bytes // 16)):
        assert wavefronts([layouts["column", row_bytes, first + row, chunk] for row in range(8)], 16) == 1


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("row_bytes", [bytes_ for name, bytes_ in SWIZZLES if name == "word"])
def test_word_swizzle_reads_without_conflicts(layouts: Layouts, row_bytes: int, operand: str) -> None:
    """One register of a 32-bit fragment whose rows are contiguous: 8 words of each of 4 lines."""
    for reg, first_row in itertools.product(REGS, range(0, row_bytes // 4, 16)):
        addresses = []
        for lane in LANES:
            row = first_row + layouts[f"{operand}_row", lane, reg]
            addresses.append(layouts["word", row_bytes, layouts[f"{operand}_k4", lane, reg], row // 4] + row % 4 * 4)
        assert wavefronts(addresses, 4) == 1


Element = tuple[int, int]  # (row, k) of a fragment


def ldmatrix(named: Callable[[int, int], Element], transpose: bool) -> dict[tuple[int, int], tuple[Element, Element]]:
    """What ldmatrix.x4 of 16-bit elements gives to (lane, reg); ``named(lane, i)`` is element i of a lane's row."""
    result = {}
    for lane, reg in itertools.product(LANES, REGS):
        row, col = lane // 4, lane % 4 * 2
        if transpose:
            result[lane, reg] = (named(8 * reg + col, row), named(8 * reg + col + 1, row))
        else:
            result[lane, reg] = (named(8 * reg + row, col), named(8 * reg + row, col + 1))
    return result


@pytest.mark.parametrize("operand", ["a", "b"])
def test_ldmatrix_gives_the_fragment(layouts: Layouts, operand: str) -> None:
    """From rows with k contiguous, and transposed from rows of k, the same elements reach the same registers."""

    def k_major(lane: int, i: int) -> Element:
        return layouts[f"{operand}_ldmatrix_row", lane], 8 * layouts[f"{operand}_ldmatrix_chunk", lane] + i

    def mn_major(lane: int, i: int) -> Element:
        return 8 * layouts[f"{operand}_ldmatrix_trans_chunk", lane] + i, layouts[f"{operand}_ldmatrix_trans_k", lane]

    expected = {}
    for lane, reg in itertools.product(LANES, REGS):
        row, k = layouts[f"{operand}_row", lane, reg], layouts[f"{operand}_k2", lane, reg]
        expected[lane, reg] = ((row, k), (row, k + 1))
    assert ldmatrix(k_major, transpose=False) == expected
    assert ldmatrix(mn_major, transpose=True) == expected


@pytest.mark.parametrize("operand", ["a", "b"])
def test_ldmatrix_gives_the_32_bit_fragment(layouts: Layouts, operand: str) -> None:
    """Without a transposition a pair of 16-bit elements is one of 32 bits."""

    def k_major(lane: int, i: int) -> Element:
        return layouts[f"{operand}_ldmatrix_row", lane], 4 * layouts[f"{operand}_ldmatrix_chunk", lane] + i // 2

    for (lane, reg), (low, high) in ldmatrix(k_major, transpose=False).items():
        assert low == high == (layouts[f"{operand}_row", lane, reg], layouts[f"{operand}_k4", lane, reg])


def test_fragments_are_those_of_the_instruction(layouts: Layouts) -> None:
    """The registers of m16n8k16 and m16n8k8 as the PTX manual numbers them, element by element."""
    for lane in LANES:
        group, thread = lane >> 2, lane & 3
        for i in range(8):  # A of m16n8k16
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            k = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            assert (layouts["a_row", lane, i // 2], layouts["a_k2", lane, i // 2] + i % 2) == (row, k)
        for i in range(4):  # A of m16n8k8, 32-bit elements
            row, k = (group if i in (0, 2) else group + 8), (thread if i < 2 else thread + 4)
            assert (layouts["a_row", lane, i], layouts["a_k4", lane, i]) == (row, k)
        for neighbour in range(2):  # B: two registers for n = 0 .. 7, two for n = 8 .. 15
            n = group + 8 * neighbour
            for i in range(4):  # of m16n8k16
                reg, k = 2 * neighbour + i // 2, thread * 2 + (i & 1) + (8 if i >= 2 else 0)
                assert (layouts["b_row", lane, reg], layouts["b_k2", lane, reg] + i % 2) == (n, k)
            for i in range(2):  # of m16n8k8
                assert (layouts["b_row", lane, 2 * neighbour + i], layouts["b_k4", lane, 2 * neighbour + i]) == (
                    n,
                    thread + 4 * i,
                )
        for i in range(4):  # C of both
            row, col = (group if i < 2 else group + 8), thread * 2 + (i & 1)
            assert (layouts["accumulator_row", lane, i], layouts["accumulator_col", lane, i]) == (row, col)


def test_an_accumulator_is_operand_a_of_a_tf32_product(layouts: Layouts) -> None:
    """Each k stands for one column of the accumulator, for all its rows, and for that row of the other matrix."""
    stands_for: dict[int, int] = {}
    for lane, reg in itertools.product(LANES, REGS):
        source = layouts["weight_register", reg]
        assert layouts["accumulator_row", lane, source] == layouts["a_row", lane, reg]
        column = layouts["accumulator_col", lane, source]
        assert stands_for.setdefault(layouts["a_k4", lane, reg], column) == column
    assert sorted(stands_for.values()) == list(range(8))
    for lane, reg, tile in itertools.product(LANES, range(2), range(4)):  # two registers of B for each accumulator
        assert layouts["weighted_row", lane] + reg == stands_for[layouts["b_k4", lane, reg]]
        column = layouts["weighted_col", lane] + tile
        assert layouts["weighted_out_col", tile, layouts["b_row", lane, reg]] == column
