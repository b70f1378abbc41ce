"""fp32 and fp64: rounded arithmetic to the bit, approximate functions within the error that the ISA states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gpusim.conformance import rounding
from tests.gpusim.conformance.forms import Compare, close_floats, elementwise, same_floats, unify_nan
from tests.gpusim.conformance.inputs import float_pairs, floats, rng
from tests.gpusim.conformance.rounding import F32, F64, Format, flush, round_to, to_float64

LAYOUTS = {"f32": F32, "f64": F64}
OPERATIONS: dict[str, tuple[Callable[..., np.ndarray], int]] = {
    "add": (rounding.add, 2),
    "sub": (lambda a, b, form, mode: rounding.add(a, b ^ form.dtype.type(form.sign), form, mode), 2),
    "mul": (rounding.mul, 2),
    "fma": (rounding.fma, 3),
    "div": (rounding.div, 2),
    "sqrt": (rounding.sqrt, 1),
    "rcp": (lambda a, form, mode: rounding.div(np.full_like(a, one(form)), a, form, mode), 1),
}


def one(layout: Format) -> int:
    return (2 ** (layout.exponent - 1) - 1) << layout.mantissa


def saturate(bits: np.ndarray, layout: Format) -> np.ndarray:
    """Into [0, 1]; NaN becomes 0."""
    negative = bits & bits.dtype.type(layout.sign) != 0
    return np.where(negative | rounding.is_nan(bits, layout), 0, np.minimum(bits, one(layout))).astype(bits.dtype)


def rounded(instruction: str) -> None:
    operation, mode, *flags, kind = instruction.split(".")
    layout = LAYOUTS[kind]
    function, count = OPERATIONS[operation]

    def expected(*operands: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            operands = tuple(flush(x, layout) for x in operands)
        result = function(*operands, layout, mode)
        if "ftz" in flags:
            result = flush(result, layout)
        return saturate(result, layout) if "sat" in flags else result

    inputs = [floats(layout, random=200)] if count == 1 else float_pairs(layout, count)
    compare = same_floats(layout, zeros="sat" not in flags)
    elementwise("float", instruction, inputs, layout.dtype, expected, compare)


for _mode in ("rn", "rz", "rm", "rp"):
    for _operation in OPERATIONS:
        rounded(f"{_operation}.{_mode}.f32")
    for _operation in ("add", "mul", "fma"):
        rounded(f"{_operation}.{_mode}.f64")
for _operation in ("div", "rcp", "sqrt"):
    rounded(f"{_operation}.rn.f64")
for _instruction in ("add.rn.ftz", "mul.rn.ftz", "fma.rn.ftz", "add.rn.sat", "fma.rn.ftz.sat"):
    rounded(f"{_instruction}.f32")


# Minimum, maximum, sign


def extreme(a: np.ndarray, b: np.ndarray, layout: Format, largest: bool, nan: bool) -> np.ndarray:
    """+0 is greater than -0; a NaN loses, or wins where that is asked for."""
    sign = a.dtype.type(layout.sign)

    def rank(x: np.ndarray) -> np.ndarray:  # unsigned integers in the order of the floats
        return np.where(x & sign, ~x, x | sign)

    take_a = rank(a) > rank(b) if largest else rank(a) < rank(b)
    lost = [rounding.is_nan(x, layout) for x in (a, b)]
    result = np.where(lost[0], b, np.where(lost[1], a, np.where(take_a, a, b)))
    if nan:
        result = np.where(lost[0] | lost[1], layout.nan, result)
    return result.astype(a.dtype)


def least_or_most(instruction: str) -> None:
    operation, *flags, kind = instruction.split(".")
    layout = LAYOUTS[kind]

    def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            a, b = flush(a, layout), flush(b, layout)
        return extreme(a, b, layout, operation == "max", "NaN" in flags)

    elementwise("float", instruction, float_pairs(layout), layout.dtype, expected, same_floats(layout))


for _operation in ("min", "max"):
    for _flags in (".f32", ".NaN.f32", ".ftz.f32", ".f64"):
        least_or_most(_operation + _flags)


def sign_of(instruction: str, expected: Callable[..., np.ndarray], count: int = 1) -> None:
    layout = LAYOUTS[instruction.rsplit(".", maxsplit=1)[-1]]
    inputs = float_pairs(layout, count) if count > 1 else [floats(layout)]

    def with_layout(*operands: np.ndarray) -> np.ndarray:
        if ".ftz" in instruction:
            operands = tuple(flush(x, layout) for x in operands)
        return expected(*operands, layout.dtype.type(layout.sign))

    elementwise("float", instruction, inputs, layout.dtype, with_layout, same_floats(layout))


for _kind in ("f32", "ftz.f32", "f64"):
    sign_of(f"abs.{_kind}", lambda x, sign: x & ~sign)
    sign_of(f"neg.{_kind}", lambda x, sign: x ^ sign)
for _kind in ("f32", "f64"):
    # the magnitude of the second with the sign of the first
    sign_of(f"copysign.{_kind}", lambda a, b, sign: a & sign | b & ~sign, 2)


# Comparisons

COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
}


def comparison(instruction: str) -> None:
    _, how, *flags, kind = instruction.split(".")
    layout = LAYOUTS[kind]

    def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if "ftz" in flags:
            a, b = flush(a, layout), flush(b, layout)
        x, y = to_float64(a, layout), to_float64(b, layout)
        unordered = np.isnan(x) | np.isnan(y)
        with np.errstate(invalid="ignore"):
            if how == "nan":
                return unordered.astype(np.uint32)
            if how in COMPARISONS:
                return COMPARISONS[how](x, y).astype(np.uint32)
            return (COMPARISONS[how[:-1]](x, y) | unordered).astype(np.uint32)

    elementwise("float", instruction, float_pairs(layout), np.uint32, expected)


for _how in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
    comparison(f"setp.{_how}.f32")
for _instruction in ("setp.lt.ftz.f32", "setp.lt.f64", "setp.neu.f64"):
    comparison(_instruction)


# Approximations. The error is as the ISA states it; results that are not finite, or zero, are exact.


def within(
    layout: Format, relative: float = 0.0, absolute: Callable[[np.ndarray], np.ndarray] | float = 0.0
) -> Compare:
    """`want` is float64. A result is rounded to its format, so half a unit of it is allowed on top for subnormals."""

    def compare(got: np.ndarray, want: np.ndarray) -> None:
        want_bits = round_to(want, layout)
        unify_nan(got, want_bits, layout)
        special = ~np.isfinite(want) | np.isinf(to_float64(want_bits, layout))
        np.testing.assert_array_equal(got[special], want_bits[special])
        value, exact = to_float64(got, layout)[~special], want[~special]
        least = 2.0 ** (layout.min_exponent - layout.mantissa)
        bound = np.maximum(np.abs(exact) * relative, absolute(exact) if callable(absolute) else absolute) + least / 2
        over = np.abs(value - exact) / np.maximum(bound, 1e-300)
        assert np.all(over <= 1), f"{over.max()} of the error allowed"

    return compare


def approximate(
    instruction: str,
    exact: Callable[[np.ndarray], np.ndarray],
    inputs: np.ndarray,
    relative: float = 0.0,
    absolute: Callable[[np.ndarray], np.ndarray] | float = 0.0,
) -> None:
    """Of one fp32; `.ftz` flushes what goes in and what comes out."""
    ftz = ".ftz" in instruction

    def expected(bits: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return exact(to_float64(flush(bits, F32) if ftz else bits, F32))

    bounded = within(F32, relative, absolute)

    def compare(got: np.ndarray, want: np.ndarray) -> None:
        if ftz:  # next to the least normal number either is right
            small = np.abs(want) < 2.0**-126 * (1 + 2.0**-20)
            assert np.all(np.abs(to_float64(got[small], F32)) < 2.0**-126 * (1 + 2.0**-19))
            got, want = got[~small], want[~small]
        bounded(got, want)

    elementwise("float", instruction, [inputs], np.uint32, expected, compare)


def log_uniform(low: int, high: int) -> np.ndarray:
    """fp32 of magnitudes between powers of two, both signs, with the edges of the format."""
    r = rng(17)
    usual = np.exp2(r.uniform(low, high, 1500)) * r.choice([-1, 1], 1500)
    return np.concatenate([floats(F32, random=0), usual.astype(np.float32).view(np.uint32)])


def ex2(instruction: str) -> None:
    """Two units in the last place of the correctly rounded result, over the full range."""
    ftz = ".ftz" in instruction

    def expected(bits: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return round_to(np.exp2(to_float64(flush(bits, F32) if ftz else bits, F32)), F32)

    close = close_floats(F32, 2)

    def compare(got: np.ndarray, want: np.ndarray) -> None:
        if ftz:
            small = want < 0x00800000
            assert np.all(got[small] == 0)
            got, want = got[~small], want[~small]
        close(got, want)

    elementwise("float", instruction, [log_uniform(-12, 8)], np.uint32, expected, compare)


def reciprocal_root(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.copysign(np.inf, x), 1 / np.sqrt(x))


for _ftz in ("", ".ftz"):
    ex2(f"ex2.approx{_ftz}.f32")
    approximate(
        f"lg2.approx{_ftz}.f32",
        np.log2,
        np.concatenate([log_uniform(-20, 20), (1 + np.arange(-500, 900) / 1024).astype(np.float32).view(np.uint32)]),
        2.0**-22,
        lambda exact: np.where(np.abs(exact) < 1, 2.0**-22, 0),
    )
    approximate(f"sqrt.approx{_ftz}.f32", np.sqrt, log_uniform(-120, 120), 2.0**-23)
    approximate(f"rsqrt.approx{_ftz}.f32", reciprocal_root, log_uniform(-120, 120), 2.0**-22.9)
    approximate(f"rcp.approx{_ftz}.f32", lambda x: 1 / x, log_uniform(-120, 120), 2.0**-23)
approximate("tanh.approx.f32", np.tanh, log_uniform(-12, 5), 2.0**-11)


def quotient(instruction: str) -> None:
    """Two units, for divisors between 2^-126 and 2^126."""
    r = rng(23)
    a, b = (np.exp2(r.uniform(-40, 40, 1024)) * r.choice([-1, 1], 1024) for _ in range(2))
    inputs = [x.astype(np.float32).view(np.uint32) for x in (a, b)]
    elementwise(
        "float",
        instruction,
        inputs,
        np.uint32,
        lambda x, y: round_to(to_float64(x, F32) / to_float64(y, F32), F32),
        close_floats(F32, 2),
    )


quotient("div.approx.f32")
quotient("div.full.f32")


def circle(instruction: str, exact: Callable[[np.ndarray], np.ndarray]) -> None:
    """2^-20.5 between -pi and pi."""
    inputs = np.linspace(-np.pi, np.pi, 1024).astype(np.float32).view(np.uint32)
    approximate(instruction, exact, inputs, 0.0, 2.0**-20.5)


circle("sin.approx.f32", np.sin)
circle("cos.approx.f32", np.cos)
