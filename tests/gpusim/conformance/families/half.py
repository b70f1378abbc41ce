"""fp16 and bf16, scalar and in pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gpusim.conformance import rounding
from tests.gpusim.conformance.families.float import extreme, saturate, within
from tests.gpusim.conformance.forms import elementwise, same_floats
from tests.gpusim.conformance.inputs import float_pairs, shuffled
from tests.gpusim.conformance.rounding import BF16, F16, Format, flush, is_nan, to_float64

LAYOUTS = {"f16": F16, "bf16": BF16}
Operation = Callable[..., np.ndarray]


def relu(bits: np.ndarray, layout: Format) -> np.ndarray:
    negative = (bits & bits.dtype.type(layout.sign) != 0) & ~is_nan(bits, layout)
    return np.where(negative, 0, bits).astype(bits.dtype)


def scalar(operation: str, flags: list[str], layout: Format) -> tuple[int, Operation]:
    """How many operands, and what is done to halves one by one."""
    sign = np.uint16(layout.sign)
    count, plain = {
        "add": (2, lambda a, b: rounding.add(a, b, layout)),
        "sub": (2, lambda a, b: rounding.add(a, b ^ sign, layout)),
        "mul": (2, lambda a, b: rounding.mul(a, b, layout)),
        "fma": (3, lambda a, b, c: rounding.fma(a, b, c, layout)),
        "min": (2, lambda a, b: extreme(a, b, layout, False, "NaN" in flags)),
        "max": (2, lambda a, b: extreme(a, b, layout, True, "NaN" in flags)),
        "neg": (1, lambda a: a ^ sign),
        "abs": (1, lambda a: a & ~sign),
    }[operation]

    def full(*operands: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            operands = tuple(flush(x, layout) for x in operands)
        result = plain(*operands)
        if "ftz" in flags:
            result = flush(result, layout)
        if "sat" in flags:
            result = saturate(result, layout)
        return relu(result, layout) if "relu" in flags else result

    return count, full


def pairs_of(operands: list[np.ndarray]) -> list[np.ndarray]:
    """Every value in the low half; in the high half the same, in another order."""
    n = operands[0].size
    order = shuffled(np.arange(n), 9)
    return [x.astype(np.uint32) | x[order].astype(np.uint32) << 16 for x in operands]


def by_halves(function: Operation) -> Operation:
    return lambda *packed: function(*(x.view(np.uint16) for x in packed)).view(np.uint32)


def arithmetic(family: str, instruction: str) -> None:
    operation, *flags, kind = instruction.split(".")
    layout = LAYOUTS[kind]
    count, function = scalar(operation, flags, layout)
    operands = float_pairs(layout, count)
    zeros = not {"sat", "relu"} & set(flags)
    elementwise(family, instruction, operands, np.uint16, function, same_floats(layout, zeros=zeros))
    packed = same_floats(layout, packed=True, zeros=zeros)
    elementwise(family, instruction + "x2", pairs_of(operands), np.uint32, by_halves(function), packed)


for _instruction in (
    "add.rn.f16",
    "sub.rn.f16",
    "mul.rn.f16",
    "fma.rn.f16",
    "add.ftz.f16",
    "mul.ftz.f16",
    "add.sat.f16",
    "mul.sat.f16",
    "fma.rn.ftz.f16",
    "fma.rn.sat.f16",
    "fma.rn.relu.f16",
    "min.f16",
    "max.f16",
    "min.NaN.f16",
    "max.NaN.f16",
    "max.ftz.f16",
    "neg.f16",
    "abs.f16",
    "fma.rn.bf16",
    "fma.rn.relu.bf16",
    "min.bf16",
    "max.bf16",
    "min.NaN.bf16",
    "max.NaN.bf16",
    "neg.bf16",
    "abs.bf16",
):
    arithmetic("half", _instruction)
for _instruction in ("add.rn.bf16", "sub.rn.bf16", "mul.rn.bf16"):
    arithmetic("half_sm90", _instruction)


# Approximations


def approximate(family: str, instruction: str, exact: Operation, relative: float, absolute: float) -> None:
    kind = instruction.rsplit(".", maxsplit=1)[-1]
    layout = LAYOUTS[kind]
    bits = np.arange(0, 2**16, 7).astype(np.uint16)

    def expected(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return exact(to_float64(flush(x, layout) if ".ftz" in instruction else x, layout))

    compare = within(layout, relative, absolute)
    elementwise(family, instruction, [bits], np.uint16, expected, compare)
    elementwise(
        family,
        instruction + "x2",
        pairs_of([bits]),
        np.uint32,
        lambda x: expected(x.view(np.uint16)).reshape(-1, 2),
        lambda got, want: compare(got.view(np.uint16), want.ravel()),
    )


approximate("half", "ex2.approx.f16", np.exp2, 2.0**-9.9, 0)
approximate("half", "tanh.approx.f16", np.tanh, 0, 2.0**-10.987)
approximate("half_sm90", "ex2.approx.ftz.bf16", np.exp2, 2.0**-7, 2.0**-126)
approximate("half_sm90", "tanh.approx.bf16", np.tanh, 0, 2.0**-8)
