"""The list of forms: a name, the file of kernels it is in, and a function that runs it and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.gpusim.conformance.machine import Machine
from tests.gpusim.conformance.rounding import Format, is_nan

Check = Callable[[Machine], None]
Compare = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Form:
    """`name` is what the test is called: the instruction, and what else tells it from others."""

    name: str
    family: str
    check: Check


FORMS: dict[str, Form] = {}


def form(name: str, family: str) -> Callable[[Check], Check]:
    """Register a check under a name."""

    def register(check: Check) -> Check:
        assert name not in FORMS, name
        FORMS[name] = Form(name, family, check)
        return check

    return register


def kernel_name(instruction: str) -> str:
    return instruction.replace("::", "_").replace(".", "_")


def elementwise(
    family: str,
    instruction: str,
    inputs: Sequence[np.ndarray],
    out: type | np.dtype,
    expected: Callable[..., np.ndarray],
    compare: Compare | None = None,
) -> None:
    """Register an instruction of registers only: one thread an element, `expected` of the inputs."""

    @form(instruction, family)
    def check(machine: Machine) -> None:
        n = -(-inputs[0].shape[0] // 64) * 64
        padded = [np.resize(x, (n, *x.shape[1:])) for x in inputs]
        want = np.asarray(expected(*padded))
        got = np.zeros(want.shape if len(want) > n else n, out)
        machine.launch(family, kernel_name(instruction), n // 64, 64, *padded, got)
        try:
            (compare or same_bits)(got, want)
        except AssertionError as error:
            raise AssertionError(f"{instruction}: {error}{first_difference(got, want, padded)}") from None


def first_difference(got: np.ndarray, want: np.ndarray, inputs: Sequence[np.ndarray]) -> str:
    """Where bits differ first, in hexadecimal; `got` has one row an input, or is made of such arrays."""
    if got.shape != want.shape or want.dtype.kind == "f":
        return ""
    n = inputs[0].shape[0]
    at = tuple(np.argwhere(got != want)[0])
    i = at[-1] if got.shape[-1] == n else at[0]
    return f"\nfirst: inputs {[hex_of(x[i]) for x in inputs]} gave {hex_of(got[at])}, not {hex_of(want[at])}"


def hex_of(x: np.ndarray) -> str:
    return " ".join(f"{int(v):#x}" for v in np.atleast_1d(x))


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    differ = got != want
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ"


# Comparisons of floats given as bits: where both are NaN, what was got is made equal to what was wanted


def unify_nan(got: np.ndarray, want: np.ndarray, layout: Format) -> None:
    both = is_nan(want, layout) & is_nan(got, layout)
    got[both] = want[both]


def same_floats(layout: Format, packed: bool = False, zeros: bool = True) -> Compare:
    """Equal bits, but any NaN equals any NaN; with zeros=False, +0 equals -0 as well."""

    def compare(got: np.ndarray, want: np.ndarray) -> None:
        if packed:
            got, want = got.view(np.uint16), want.view(np.uint16)
        unify_nan(got, want, layout)
        if not zeros:
            no_sign = got.dtype.type((layout.sign - 1) << layout.shift)
            both = (got | want) & no_sign == 0
            got[both] = want[both]
        same_bits(got, want)

    return compare


def close_floats(layout: Format, ulp: int, packed: bool = False) -> Compare:
    """Within so many units in the last place; NaN at the same places, infinities the same."""

    def compare(got: np.ndarray, want: np.ndarray) -> None:
        if packed:
            got, want = got.view(np.uint16), want.view(np.uint16)
        unify_nan(got, want, layout)
        distance = np.abs(_on_a_line(got, layout) - _on_a_line(want, layout))
        near = distance <= ulp
        got[near] = want[near]
        assert near.all(), f"{distance.max()} ulp at {(~near).sum()} places, at most {ulp} are allowed"

    return compare


def _on_a_line(bits: np.ndarray, layout: Format) -> np.ndarray:
    """Whole numbers in the order of the floats."""
    magnitude = (bits & bits.dtype.type(layout.sign - 1)).astype(np.int64)
    return np.where(bits & bits.dtype.type(layout.sign), -magnitude, magnitude)
