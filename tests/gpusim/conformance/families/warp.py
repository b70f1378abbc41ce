"""Exchange between the lanes of a warp, from the pseudo-code of the ISA."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.machine import Machine

UNTOUCHED = 0xDEADBEEF
MASKS = (0xFFFFFFFF, 0x0000FFFF, 0x80000001, 0x5A5A5A5A, 0x00000010)


def lanes(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


def untouched() -> np.ndarray:
    return np.full(32, UNTOUCHED, np.uint32)


def shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, int]:
    """The lane read from, and the predicate."""
    segment, limit, b = c >> 8 & 31, c & 31, b & 31
    highest = lane & segment | limit & ~segment
    lowest = lane & segment
    source = {
        "up": lane - b,
        "down": lane + b,
        "bfly": lane ^ b,
        "idx": lowest | b & ~segment & 31,
    }[mode]
    inside = source >= highest if mode == "up" else source <= highest
    return (source if inside else lane), int(inside)


def shuffle(mode: str) -> None:
    @form(f"shfl.sync.{mode}.b32", "warp")
    def check(machine: Machine) -> None:
        r = rng(41)
        for width in (32, 16, 8, 4, 2, 1):
            for per_lane in (False, True):
                a = r.integers(0, 2**32, 32, np.uint64).astype(np.uint32)
                b = (r.integers(0, 40, 32) if per_lane else np.full(32, r.integers(0, width + 1))).astype(np.uint32)
                c = np.full(32, (32 - width) << 8 | (0 if mode == "up" else 31), np.uint32)
                got = [untouched(), untouched()]
                machine.launch("warp", f"shfl_{mode}", 1, 32, a, b, c, np.uint32(0xFFFFFFFF), *got)
                sources = [shuffle_source(mode, lane, int(b[lane]), int(c[lane])) for lane in range(32)]
                same_bits(got[0], a[[source for source, _ in sources]])
                same_bits(got[1], np.array([inside for _, inside in sources], np.uint32))

    @form(f"shfl.sync.{mode}.b32, half of a warp", "warp")
    def check_half(machine: Machine) -> None:
        a = rng(42).integers(0, 2**32, 32, np.uint64).astype(np.uint32)
        b = np.full(32, 3, np.uint32)
        c = np.full(32, 16 << 8 | (0 if mode == "up" else 31), np.uint32)
        got, mask = [untouched(), untouched()], 0xFFFF0000
        machine.launch("warp", f"shfl_{mode}", 1, 32, a, b, c, np.uint32(mask), *got)
        want = [untouched(), untouched()]
        for lane in lanes(mask):
            source, want[1][lane] = shuffle_source(mode, lane, 3, int(c[lane]))
            want[0][lane] = a[source]
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])


for _mode in ("up", "down", "bfly", "idx"):
    shuffle(_mode)


def collective(
    instruction: str,
    kernel: str,
    values: Callable[[np.random.Generator], np.ndarray],
    *expected: Callable[[list[int], int], int],
) -> None:
    """Every lane of the mask gets, for each of `expected`, a function of the values of the mask and of its own."""

    @form(instruction, "warp")
    def check(machine: Machine) -> None:
        r = rng(43)
        for mask in MASKS:
            for _ in range(3):
                a = values(r)
                got = [untouched() for _ in expected]
                machine.launch("warp", kernel, 1, 32, a, np.uint32(mask), *got)
                for result, function in zip(got, expected, strict=True):
                    want = untouched()
                    members = a.tolist()
                    for lane in lanes(mask):
                        want[lane] = function([members[m] if mask >> m & 1 else None for m in range(32)], lane)
                    same_bits(result, want)


def bits_where(condition: Callable[[int], bool], members: list[int]) -> int:
    return sum(1 << lane for lane, value in enumerate(members) if value is not None and condition(value))


def present(members: list[int]) -> list[int]:
    return [value for value in members if value is not None]


def flags(r: np.random.Generator) -> np.ndarray:
    return (r.random(32) < r.choice([0, 0.5, 1])).astype(np.uint32)


collective("vote.sync.all.pred", "vote_all", flags, lambda m, _: all(present(m)))
collective("vote.sync.any.pred", "vote_any", flags, lambda m, _: any(present(m)))
collective("vote.sync.uni.pred", "vote_uni", flags, lambda m, _: len(set(present(m))) == 1)
collective("vote.sync.ballot.b32", "vote_ballot", flags, lambda m, _: bits_where(bool, m))


def few(dtype: type) -> Callable[[np.random.Generator], np.ndarray]:
    """Few different values, which differ in the high half if there is one."""
    return lambda r: r.integers(0, r.choice([1, 4]), 32).astype(dtype) << dtype(8 * np.dtype(dtype).itemsize - 4)


for _width, _type in ((32, np.uint32), (64, np.uint64)):
    collective(
        f"match.any.sync.b{_width}",
        f"match_any_b{_width}",
        few(_type),
        lambda m, lane: bits_where(lambda value: value == m[lane], m),
    )
    collective(
        f"match.all.sync.b{_width}",
        f"match_all_b{_width}",
        few(_type),
        lambda m, _: bits_where(lambda value: True, m) if len(set(present(m))) == 1 else 0,
        lambda m, _: len(set(present(m))) == 1,
    )


def anything(r: np.random.Generator) -> np.ndarray:
    return r.integers(0, 2**32, 32, np.uint64).astype(np.uint32)


def signed(x: int) -> int:
    return x - 2**32 if x >> 31 else x


for _kind in ("s32", "u32"):
    _key = signed if _kind == "s32" else int
    collective(
        f"redux.sync.add.{_kind}", f"redux_sync_add_{_kind}", anything, lambda m, _: sum(present(m)) & 0xFFFFFFFF
    )
    for _name, _function in (("min", min), ("max", max)):
        collective(
            f"redux.sync.{_name}.{_kind}",
            f"redux_sync_{_name}_{_kind}",
            anything,
            lambda m, _, f=_function, key=_key: f(present(m), key=key),
        )
for _name, _operation in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
    collective(
        f"redux.sync.{_name}.b32",
        f"redux_sync_{_name}_b32",
        anything,
        lambda m, _, f=_operation: reduce(f, present(m)),
    )


@form("activemask.b32", "warp")
def check_activemask(machine: Machine) -> None:
    """Which lanes run together is left to the hardware: the own lane at least, none outside of the branch."""
    for mask in MASKS:
        got = untouched()
        machine.launch("warp", "activemask", 1, 32, np.uint32(mask), got)
        for lane in range(32):
            if mask >> lane & 1:
                assert got[lane] >> lane & 1
                assert not int(got[lane]) & ~mask
            else:
                assert got[lane] == UNTOUCHED


@form("elect.sync", "warp_sm90")
def check_elect(machine: Machine) -> None:
    """One lane of the mask, the same for all."""
    for mask in MASKS:
        leader, elected = untouched(), untouched()
        machine.launch("warp_sm90", "elect_sync", 1, 32, np.uint32(mask), leader, elected)
        members = lanes(mask)
        assert len(set(leader[members].tolist())) == 1
        chosen = int(leader[members[0]])
        assert chosen in members
        assert [lane for lane in members if elected[lane]] == [chosen]
        assert all(elected[lane] == UNTOUCHED for lane in range(32) if lane not in members)


@form("%laneid %lanemask_* %tid %ctaid %nctaid", "warp")
def check_special_registers(machine: Machine) -> None:
    got = np.zeros((3, 4, 16, 9), np.uint32)  # blocks, y, x
    machine.launch("warp", "special_registers", 3, (16, 4), got)
    full = 0xFFFFFFFF
    for block in range(3):
        for y in range(4):
            for x in range(16):
                lane = (y * 16 + x) % 32
                below = 2**lane - 1
                masks = [2**lane, below, below | 2**lane, full & ~(below | 2**lane), full & ~below]
                assert got[block, y, x].tolist() == [lane, *masks, y, block, 3]
