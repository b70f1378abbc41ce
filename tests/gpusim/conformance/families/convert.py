"""cvt."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.forms import elementwise, same_floats
from tests.gpusim.conformance.inputs import floats, integers, shuffled
from tests.gpusim.conformance.rounding import (
    BF16,
    F16,
    F32,
    F64,
    TF32,
    Format,
    flush,
    from_integers,
    round_integral,
    round_to,
    to_float64,
    to_integers,
)

FLOATS = {"f16": F16, "bf16": BF16, "tf32": TF32, "f32": F32, "f64": F64}
INTEGER_MODES = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


def relu(bits: np.ndarray, layout: Format) -> np.ndarray:
    """What is negative becomes zero; NaN stays NaN."""
    negative = (bits >> bits.dtype.type(layout.bits - 1 + layout.shift) != 0) & ~np.isnan(to_float64(bits, layout))
    return np.where(negative, 0, bits).astype(bits.dtype)


def signed(bits: np.ndarray) -> list[int]:
    return bits.view(f"i{bits.itemsize}").tolist()


def wrapped(values: list[int], width: int) -> np.ndarray:
    return np.array([v % 2**width for v in values], f"u{width // 8}")


# fp32 to narrower floats


def narrow(instruction: str) -> None:
    _, mode, *flags, to, source = instruction.split(".")
    layout, given = FLOATS[to.removesuffix("x2")], FLOATS[source]

    def one(bits: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            bits = flush(bits, given)
        value = to_float64(bits, given)
        if "sat" in flags:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1))
        result = round_to(value, layout, mode)
        return relu(result, layout) if "relu" in flags else result

    def two(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return one(high).astype(np.uint32) << 16 | one(low)

    packed = to.endswith("x2")
    values = floats(given)
    family = "convert_sm90" if instruction in SM90_NARROW else "convert"
    # The sign of a zero that relu or sat makes of a negative number is not stated.
    compare = same_floats(layout, packed, zeros=not {"relu", "sat"} & set(flags))
    inputs = [values, shuffled(values, 1)] if packed else [values]
    elementwise(family, instruction, inputs, np.uint32 if packed else layout.dtype, two if packed else one, compare)


SM90_NARROW = ("cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rn.relu.tf32.f32", "cvt.rn.bf16.f16", "cvt.rn.f16.bf16")
SM90_NARROW += ("cvt.rn.bf16.f64",)
for _to in ("f16", "bf16"):
    for _flags in ("rn", "rz", "rn.relu"):
        narrow(f"cvt.{_flags}.{_to}.f32")
        narrow(f"cvt.{_flags}.{_to}x2.f32")
for _instruction in ("cvt.rn.ftz.f16.f32", "cvt.rn.sat.f16.f32", "cvt.rna.tf32.f32", "cvt.rn.f16.f64", *SM90_NARROW):
    narrow(_instruction)
for _mode in ("rn", "rz", "rm", "rp"):
    narrow(f"cvt.{_mode}.f32.f64")


# Between floats, and to whole numbers that stay floats


def widen_to_f32(bits: np.ndarray, layout: Format) -> np.ndarray:
    return round_to(to_float64(bits, layout), F32)


elementwise("convert", "cvt.f32.f16", [floats(F16)], np.uint32, lambda x: widen_to_f32(x, F16), same_floats(F32))
elementwise(
    "convert_sm90", "cvt.f32.bf16", [floats(BF16)], np.uint32, lambda x: widen_to_f32(x, BF16), same_floats(F32)
)
for _name in ("f16", "f32"):
    elementwise(
        "convert",
        f"cvt.f64.{_name}",
        [floats(FLOATS[_name])],
        np.uint64,
        lambda x, layout=FLOATS[_name]: to_float64(x, layout).view(np.uint64),
        same_floats(F64),
    )
for _modifier, _mode in INTEGER_MODES.items():
    elementwise(
        "convert",
        f"cvt.{_modifier}.f32.f32",
        [floats(F32)],
        np.uint32,
        lambda x, mode=_mode: round_to(np.copysign(round_integral(to_float64(x, F32), mode), to_float64(x, F32)), F32),
        same_floats(F32),
    )
elementwise(
    "convert",
    "cvt.rni.f64.f64",
    [floats(F64)],
    np.uint64,
    lambda x: round_integral(x.view(np.float64), "rn").view(np.uint64),
    same_floats(F64),
)
for _layout in (F16, BF16):
    elementwise(
        "convert" if _layout is F16 else "convert_sm90",
        f"cvt.rni.{_layout.name}.{_layout.name}",
        [floats(_layout)],
        np.uint16,
        lambda x, layout=_layout: round_to(round_integral(to_float64(x, layout), "rn"), layout),
        same_floats(_layout),
    )


def saturate(x: np.ndarray) -> np.ndarray:
    value = to_float64(x, F32)
    return round_to(np.where(np.isnan(value), 0, np.clip(value, 0, 1)), F32)


elementwise("convert", "cvt.sat.f32.f32", [floats(F32)], np.uint32, saturate, same_floats(F32, zeros=False))
elementwise("convert", "cvt.ftz.f32.f32", [floats(F32)], np.uint32, lambda x: flush(x, F32), same_floats(F32))


# Floats to integers: clamped. NaN gives 0 between 32-bit types, else the top bit alone.


def to_integer(modifier: str, to: str, source: str, family: str = "convert") -> None:
    mode, *flags = modifier.split(".")
    width = int(to[1:])
    nan = 1 << (width - 1) if source == "f64" or width == 64 else 0

    def expected(bits: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            bits = flush(bits, F32)
        return to_integers(to_float64(bits, FLOATS[source]), INTEGER_MODES[mode], to[0] == "s", width, nan)

    elementwise(family, f"cvt.{modifier}.{to}.{source}", [floats(FLOATS[source])], f"u{width // 8}", expected)


for _modifier in INTEGER_MODES:
    for _to in ("s32", "u32", "s64", "u64"):
        for _source in ("f32", "f64"):
            to_integer(_modifier, _to, _source)
    to_integer(_modifier, "s32", "f16")
to_integer("rzi.ftz", "s32", "f32")
to_integer("rpi.ftz", "s32", "f32")
to_integer("rzi", "s32", "bf16", "convert_sm90")


# Integers to floats


def from_integer(mode: str, to: str, source: str, family: str = "convert") -> None:
    layout, width = FLOATS[to], int(source[1:])

    def expected(bits: np.ndarray) -> np.ndarray:
        return from_integers(signed(bits) if source[0] == "s" else bits.tolist(), layout, mode)

    elementwise(family, f"cvt.{mode}.{to}.{source}", [integers(width)], layout.dtype, expected)


for _mode in ("rn", "rz", "rm", "rp"):
    for _source in ("s32", "u32", "s64", "u64"):
        from_integer(_mode, "f32", _source)
    from_integer(_mode, "f64", "s64")
    from_integer(_mode, "f64", "u64")
for _to in ("f16", "f64"):
    from_integer("rn", _to, "s32")
    from_integer("rn", _to, "u32")
from_integer("rn", "bf16", "s32", "convert_sm90")
from_integer("rz", "bf16", "u32", "convert_sm90")


# Between integers: truncated, extended, or saturated. An 8-bit result fills its register.


def resize(modifier: str, to: str, source: str, register: int) -> None:
    to_width, from_width = int(to[1:]), int(source[1:])
    given = integers(max(from_width, 32) if from_width == 8 else from_width)

    def expected(bits: np.ndarray) -> np.ndarray:
        values = [v % 2**from_width for v in bits.tolist()]
        if source[0] == "s":
            values = [v - 2**from_width if v >> (from_width - 1) else v for v in values]
        low, high = (-(2 ** (to_width - 1)), 2 ** (to_width - 1) - 1) if to[0] == "s" else (0, 2**to_width - 1)
        values = [min(max(v, low), high) for v in values] if modifier else [v % 2**to_width for v in values]
        return wrapped(values, register)

    elementwise("convert", f"cvt.{modifier}{to}.{source}", [given], f"u{register // 8}", expected)


for _to, _source, _register in (
    ("s32", "s8", 32),
    ("u32", "u8", 32),
    ("s32", "s16", 32),
    ("u32", "u16", 32),
    ("s64", "s32", 64),
    ("u64", "u32", 64),
    ("u32", "u64", 32),
    ("u16", "u32", 16),
):
    resize("", _to, _source, _register)
for _to, _source, _register in (
    ("s8", "s32", 32),
    ("u8", "s32", 32),
    ("s16", "s32", 16),
    ("u16", "s32", 16),
    ("s32", "s64", 32),
    ("u32", "s64", 32),
):
    resize("sat.", _to, _source, _register)
