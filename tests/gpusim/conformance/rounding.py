"""Binary floats as the PTX ISA describes them: exact values, rounded once, by rational arithmetic and by NumPy.

Values travel as raw bits. NaN has one canonical pattern here; tests compare NaN by position only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary interchange format; `shift` zero bits below it fill the register (tf32 in 32 bits)."""

    name: str
    exponent: int
    mantissa: int
    shift: int = 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(f"u{(1 + self.exponent + self.mantissa + self.shift) // 8}")

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def min_exponent(self) -> int:
        return 2 - 2 ** (self.exponent - 1)

    @property
    def infinity(self) -> int:
        return (2**self.exponent - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nan(self) -> int:
        return self.sign - 1


F16, BF16, TF32 = Format("f16", 5, 10), Format("bf16", 8, 7), Format("tf32", 8, 10, 13)
F32, F64 = Format("f32", 8, 23), Format("f64", 11, 52)
MODES = ("rn", "rz", "rm", "rp", "rna")


# Arrays


def to_float64(bits: np.ndarray, form: Format) -> np.ndarray:
    """The values of raw bits (of any format but f64, exactly)."""
    if form is F64:
        return bits.view(np.float64)
    if form is F16:
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << (16 if form is BF16 else 0)).view(np.float32).astype(np.float64)


def round_integral(x: np.ndarray, mode: str) -> np.ndarray:
    """To whole numbers. `mode` is of MODES."""
    x = np.where(np.isnan(x), np.nan, x)  # quiet
    if mode == "rna":
        return np.trunc(x) + np.where(np.abs(x - np.trunc(x)) >= 0.5, np.sign(x), 0)
    return {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[mode](x)


def round_to(x: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    """Raw bits of float64 values rounded to a format narrower than f64."""
    negative, finite = np.signbit(x), np.isfinite(x)
    magnitude = np.where(finite, np.abs(x), 0)
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude > 0, np.maximum(exponent, form.min_exponent), form.min_exponent)
    scaled = np.ldexp(magnitude, form.mantissa - exponent)
    steps = np.where(negative, -1, 1) * round_integral(np.where(negative, -scaled, scaled), mode)
    bits = ((exponent - form.min_exponent) << form.mantissa) + steps.astype(np.int64)
    away = (mode in ("rn", "rna")) | (mode == "rp") & ~negative | (mode == "rm") & negative
    bits = np.where(bits >= form.infinity, np.where(away, form.infinity, form.infinity - 1), bits)
    bits = np.where(np.isinf(x), form.infinity, bits) | np.where(negative, form.sign, 0)
    return (np.where(np.isnan(x), form.nan, bits) << form.shift).astype(form.dtype)


def flush(bits: np.ndarray, form: Format) -> np.ndarray:
    """Subnormal numbers become zeros of the same sign."""
    low = form.dtype.type(form.infinity)
    return np.where(bits & low == 0, bits & form.dtype.type(form.sign), bits).astype(form.dtype)


def is_nan(bits: np.ndarray, form: Format) -> np.ndarray:
    return (bits.astype(np.uint64) >> np.uint64(form.shift)) & np.uint64(form.sign - 1) > form.infinity


# One value at a time, by rational arithmetic


def round_fraction(value: Fraction, form: Format, mode: str = "rn") -> int:
    """Raw bits of an exact non-zero value."""
    negative, magnitude = value < 0, abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, form.min_exponent)
    scaled = magnitude / Fraction(2) ** (exponent - form.mantissa)
    steps, rest = divmod(scaled, 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    bits = ((exponent - form.min_exponent) << form.mantissa) + int(steps) + up
    if bits >= form.infinity:
        away = mode in ("rn", "rna") or mode == ("rm" if negative else "rp")
        bits = form.infinity if away else form.infinity - 1
    return bits | (form.sign if negative else 0)


def _decode(bits: int, form: Format) -> Fraction:
    """The value of finite raw bits."""
    exponent, mantissa = (bits & ~form.sign) >> form.mantissa, bits & (1 << form.mantissa) - 1
    if exponent:
        mantissa += 1 << form.mantissa
    value = Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - 1 + form.min_exponent - form.mantissa)
    return -value if bits & form.sign else value


def _fma(a: int, b: int, c: int, form: Format, mode: str) -> int:
    """a * b + c, rounded once; zeros, infinities and NaN as in IEEE 754."""
    magnitudes = [x & ~form.sign for x in (a, b, c)]
    sign = (a ^ b) & form.sign
    if max(magnitudes) > form.infinity:
        return form.nan
    if form.infinity in magnitudes[:2]:
        cancels = magnitudes[2] == form.infinity and sign != c & form.sign
        return form.nan if 0 in magnitudes[:2] or cancels else form.infinity | sign
    if magnitudes[2] == form.infinity:
        return c
    value = _decode(a, form) * _decode(b, form) + _decode(c, form)
    if value:
        return round_fraction(value, form, mode)
    both_zero = 0 in magnitudes[:2] and magnitudes[2] == 0
    if both_zero and sign == c & form.sign:
        return sign
    return form.sign if mode == "rm" else 0


def _div(a: int, b: int, form: Format, mode: str) -> int:
    x, y = a & ~form.sign, b & ~form.sign
    sign = (a ^ b) & form.sign
    if max(x, y) > form.infinity or (x == y and x in (0, form.infinity)):
        return form.nan
    if x == form.infinity or y == 0:
        return form.infinity | sign
    if x == 0 or y == form.infinity:
        return sign
    return round_fraction(_decode(a, form) / _decode(b, form), form, mode)


def _each(function: Callable[..., int], form: Format, *operands: np.ndarray) -> np.ndarray:
    return np.array([function(*values) for values in zip(*(x.tolist() for x in operands), strict=True)], form.dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    return _each(lambda x, y, z: _fma(x, y, z, form, mode), form, a, b, c)


def add(a: np.ndarray, b: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    one = (2 ** (form.exponent - 1) - 1) << form.mantissa
    return _each(lambda x, y: _fma(x, one, y, form, mode), form, a, b)


def mul(a: np.ndarray, b: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    return _each(lambda x, y: _fma(x, y, (x ^ y) & form.sign, form, mode), form, a, b)


def div(a: np.ndarray, b: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    return _each(lambda x, y: _div(x, y, form, mode), form, a, b)


def sqrt(a: np.ndarray, form: Format, mode: str = "rn") -> np.ndarray:
    """By an integer square root with more bits than needed, and one more that says whether something is left."""

    def one(bits: int) -> int:
        if bits & ~form.sign == 0 or bits == form.infinity:
            return bits
        if bits & form.sign or bits > form.infinity:
            return form.nan
        value = _decode(bits, form)
        scale = 2 * form.mantissa + 300 + 2 * abs(form.min_exponent)
        square = value * Fraction(4) ** scale
        root = isqrt(int(square))
        exact = Fraction(root * root) == square
        return round_fraction(Fraction(2 * root + (not exact), 2) / Fraction(2) ** scale, form, mode)

    return _each(one, form, a)


def from_integers(values: list[int], form: Format, mode: str = "rn") -> np.ndarray:
    return np.array([round_fraction(Fraction(v), form, mode) if v else 0 for v in values], form.dtype)


def to_integers(x: np.ndarray, mode: str, signed: bool, width: int, nan: int) -> np.ndarray:
    """float64 values to whole numbers of `width` bits, clamped; what NaN gives is said by the caller."""
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
    out = []
    for value in round_integral(x, mode).tolist():
        if value != value:
            out.append(nan)
        elif abs(value) == float("inf"):
            out.append(high if value > 0 else low)
        else:
            out.append(min(max(int(value), low), high))
    return np.array([v & (2**width - 1) for v in out], f"u{width // 8}")
