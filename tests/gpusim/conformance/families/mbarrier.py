"""mbarriers: what is seen at every step of a phase, and phases that order reads after writes."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.machine import Machine


def steps(name: str, family: str, kernel: str, *expected: tuple[str, int]) -> None:
    """One thread writes down what it sees."""

    @form(name, family)
    def check(machine: Machine) -> None:
        got = np.full(len(expected), 99, np.uint32)
        machine.launch(family, kernel, 1, 1, got)
        wrong = [f"{what}: {g}, not {w}" for (what, w), g in zip(expected, got.tolist(), strict=True) if g != w]
        assert not wrong, "; ".join(wrong)


# An arrival returns the state before it.
steps(
    "mbarrier.init arrive arrive_drop test_wait pending_count",
    "mbarrier",
    "phases",
    ("a fresh barrier has passed parity 1", 1),
    ("but not parity 0", 0),
    ("pending before the first of 3 arrivals", 3),
    ("over after one of 3", 0),
    ("pending before the second", 2),
    ("parity 0 after two of 3", 0),
    ("first state after three of 3", 1),
    ("second state after three of 3", 1),
    ("parity 0 after three of 3", 1),
    ("parity 1 in phase 1", 0),
    ("pending before the arrive_drop", 3),
    ("pending before the noComplete", 2),
    ("phase 1 after two of 3", 0),
    ("phase 1 after three of 3", 1),
    ("parity 1 after phase 1", 1),
    ("pending in phase 2, one dropped out", 2),
    ("parity 0 in phase 2", 0),
    ("phase 2 after two of 2", 1),
    ("parity 0 after phase 2", 1),
)
steps(
    "mbarrier.expect_tx complete_tx arrive.expect_tx try_wait",
    "mbarrier_sm90",
    "transactions",
    ("a fresh barrier has passed parity 1", 1),
    ("one of 2 arrivals, 96 bytes missing", 0),
    ("all arrived, 96 bytes missing", 0),
    ("64 bytes missing", 0),
    ("none missing", 1),
    ("parity 0", 1),
    ("parity 1", 0),
    ("both arrivals at once, 16 bytes missing", 0),
    ("none missing in phase 1", 1),
    ("try_wait with a time", 1),
    ("try_wait on a state", 1),
)


@form("mbarrier phases between warps", "mbarrier")
def check_rounds(machine: Machine) -> None:
    values = rng(81).integers(0, 2**31, 128).astype(np.uint32)
    got, want = np.zeros_like(values), values
    machine.launch("mbarrier", "rounds", 1, 128, values, got, np.int32(7))
    for i in range(7):
        want = np.roll(want, -33) + np.uint32(i)
    same_bits(got, want)


def copy_that_arrives(name: str, kernel: str) -> None:
    @form(name, "mbarrier")
    def check(machine: Machine) -> None:
        given = rng(82).integers(0, 2**32, (64, 4), np.uint64).astype(np.uint32)
        got = np.zeros_like(given)
        machine.launch("mbarrier", kernel, 1, 64, given, got)
        same_bits(got, given[::-1])


copy_that_arrives("cp.async.mbarrier.arrive.noinc", "copy_arrives_noinc")
copy_that_arrives("cp.async.mbarrier.arrive.noinc, and the thread", "copy_and_thread_arrive")
copy_that_arrives("cp.async.mbarrier.arrive", "copy_arrives")
