"""Integers and bits, on Python's own whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gpusim.conformance.forms import elementwise, form, same_bits
from tests.gpusim.conformance.inputs import integers, rng, shuffled
from tests.gpusim.conformance.machine import Machine


def width_of(kind: str) -> int:
    return int(kind[1:])


def to_signed(x: int, width: int) -> int:
    return x - 2**width if x >> (width - 1) else x


def register(
    instruction: str,
    function: Callable[..., int],
    out: str,
    *operands: str,
    zero: dict[int, int] | None = None,
    limits: dict[int, int] | None = None,
) -> None:
    """`function` of whole numbers, of the operands' types (s32, u64, ...); its low bits are the result. `zero` replaces
    a zero operand (divisors), `limits` keeps an operand below a bound three times in four."""
    inputs = []
    for i, kind in enumerate(operands):
        values = shuffled(integers(max(width_of(o) for o in operands)), i + 1) if i else integers(width_of(kind))
        values = np.resize(values, 1024).astype(f"u{width_of(kind) // 8}")
        if limits and i in limits:
            small = rng(i).integers(0, limits[i], 1024).astype(values.dtype)
            values = np.where(np.arange(1024) % 4 == 3, values, small)
        if zero and i in zero:
            values = np.where(values == 0, zero[i], values).astype(values.dtype)
        inputs.append(values)
    dtype = np.dtype(f"u{width_of(out) // 8}")

    def expected(*columns: np.ndarray) -> np.ndarray:
        lists = [
            [to_signed(v, width_of(kind)) if kind[0] == "s" else v for v in column.tolist()]
            for kind, column in zip(operands, columns, strict=True)
        ]
        return np.array([function(*row) % 2 ** width_of(out) for row in zip(*lists, strict=True)], dtype)

    elementwise("integer", instruction, inputs, dtype, expected)


def quotient(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamp(x: int, width: int) -> int:
    return min(max(x, -(2 ** (width - 1))), 2 ** (width - 1) - 1)


for _kind in ("s32", "u32", "s64", "u64", "s16", "u16"):
    register(f"min.{_kind}", min, _kind, _kind, _kind)
    register(f"max.{_kind}", max, _kind, _kind, _kind)
    _safe = {1: 3}  # division by zero, and the most negative by -1, are not defined
    _divisor = "u" + _kind[1:] if _kind[0] == "u" else _kind
    register(f"div.{_kind}", quotient, _kind, _kind, _divisor, zero=_safe)
    register(f"rem.{_kind}", lambda a, b: a - b * quotient(a, b), _kind, _kind, _divisor, zero=_safe)
    _width = width_of(_kind)
    register(f"mul.lo.{_kind}", lambda a, b: a * b, _kind, _kind, _kind)
    register(f"mul.hi.{_kind}", lambda a, b, w=_width: a * b >> w, _kind, _kind, _kind)
    register(f"mad.lo.{_kind}", lambda a, b, c: a * b + c, _kind, _kind, _kind, _kind)
    register(f"mad.hi.{_kind}", lambda a, b, c, w=_width: (a * b >> w) + c, _kind, _kind, _kind, _kind)
    if _width < 64:
        _wide = f"{_kind[0]}{2 * _width}"
        register(f"mul.wide.{_kind}", lambda a, b: a * b, _wide, _kind, _kind)
        register(f"mad.wide.{_kind}", lambda a, b, c: a * b + c, _wide, _kind, _kind, _wide)

register("add.s32", lambda a, b: a + b, "s32", "s32", "s32")
register("add.u16", lambda a, b: a + b, "u16", "u16", "u16")
register("sub.s64", lambda a, b: a - b, "s64", "s64", "s64")
register("add.sat.s32", lambda a, b: clamp(a + b, 32), "s32", "s32", "s32")
register("sub.sat.s32", lambda a, b: clamp(a - b, 32), "s32", "s32", "s32")
register("sad.s32", lambda a, b, c: abs(a - b) + c, "s32", "s32", "s32", "s32")
register("sad.u32", lambda a, b, c: abs(a - b) + c, "u32", "u32", "u32", "u32")


def parts(x: int, width: int, signed: bool) -> list[int]:
    values = [x >> at & 2**width - 1 for at in range(0, 32, width)]
    return [to_signed(v, width) for v in values] if signed else values


def dot(a: int, b: int, c: int, a_signed: bool, b_signed: bool) -> int:
    return sum(x * y for x, y in zip(parts(a, 8, a_signed), parts(b, 8, b_signed), strict=True)) + c


register("dp4a.s32.s32", lambda a, b, c: dot(a, b, c, True, True), "s32", "u32", "u32", "s32")
register("dp4a.u32.s32", lambda a, b, c: dot(a, b, c, False, True), "s32", "u32", "u32", "s32")

# One operand


def most_significant(x: int) -> int:
    """Position of the highest bit that differs from the sign; all ones if there is none."""
    return (x if x >= 0 else ~x).bit_length() - 1


register("abs.s32", abs, "s32", "s32")
register("neg.s32", lambda a: -a, "s32", "s32")
register("abs.s64", abs, "s64", "s64")
register("not.b32", lambda a: ~a, "u32", "u32")
register("cnot.b32", lambda a: int(a == 0), "u32", "u32")
for _width in (32, 64):
    _kind = f"u{_width}"
    register(f"popc.b{_width}", int.bit_count, "u32", _kind)
    register(f"clz.b{_width}", lambda a, w=_width: w - a.bit_length(), "u32", _kind)
    register(f"brev.b{_width}", lambda a, w=_width: int(f"{a:0{w}b}"[::-1], 2), _kind, _kind)
    register(f"bfind.u{_width}", most_significant, "u32", _kind)
    register(f"bfind.s{_width}", most_significant, "u32", f"s{_width}")
register("bfind.shiftamt.u32", lambda a: 31 - most_significant(a) if a else -1, "u32", "u32")
register("and.b32", lambda a, b: a & b, "u32", "u32", "u32")
register("or.b64", lambda a, b: a | b, "u64", "u64", "u64")
register("xor.b16", lambda a, b: a ^ b, "u16", "u16", "u16")


# Shifts and fields: amounts beyond the width are clamped, or wrap where the name says so

for _width in (16, 32, 64):
    _kind = f"u{_width}"
    register(f"shl.b{_width}", lambda a, b, w=_width: a << min(b, w), _kind, _kind, "u32", limits={1: _width + 3})
    if _width != 16:
        register(f"shr.u{_width}", lambda a, b, w=_width: a >> min(b, w), _kind, _kind, "u32", limits={1: _width + 3})
    _signed = f"s{_width}"
    register(f"shr.s{_width}", lambda a, b, w=_width: a >> min(b, w), _signed, _signed, "u32", limits={1: _width + 3})


def funnel(left: bool, wrap: bool) -> Callable[[int, int, int], int]:
    def shift(low: int, high: int, amount: int) -> int:
        n = amount % 32 if wrap else min(amount, 32)
        both = high << 32 | low
        return both << n >> 32 if left else both >> n

    return shift


for _direction in "lr":
    for _mode in ("wrap", "clamp"):
        register(
            f"shf.{_direction}.{_mode}.b32",
            funnel(_direction == "l", _mode == "wrap"),
            "u32",
            "u32",
            "u32",
            "u32",
            limits={2: 36},
        )


def extract(width: int, signed: bool) -> Callable[[int, int, int], int]:
    """A field of `length` bits from `at`; a signed one is extended by its top bit (or the operand's, beyond that)."""

    def field(a: int, at: int, length: int) -> int:
        at, length = at & 0xFF, length & 0xFF
        if length == 0:
            return 0
        value = (a >> at) & (2**length - 1)
        if signed and a >> min(at + length - 1, width - 1) & 1:
            value |= -1 << min(length, max(width - at, 0))
        return value

    return field


def insert(width: int) -> Callable[[int, int, int, int], int]:
    def field(a: int, b: int, at: int, length: int) -> int:
        at, length = at & 0xFF, length & 0xFF
        mask = ((2**length - 1) << at) % 2**width if at < width else 0
        return b & ~mask | (a << at) & mask

    return field


for _width in (32, 64):
    _limits = {1: _width + 5, 2: _width + 5}
    _kind = f"u{_width}"
    register(f"bfe.u{_width}", extract(_width, False), _kind, _kind, "u32", "u32", limits=_limits)
    register(f"bfe.s{_width}", extract(_width, True), _kind, _kind, "u32", "u32", limits=_limits)
    _limits = {2: _width + 5, 3: _width + 5}
    register(f"bfi.b{_width}", insert(_width), _kind, _kind, _kind, "u32", "u32", limits=_limits)


register("slct.b32.s32", lambda a, b, c: a if c >= 0 else b, "u32", "u32", "u32", "s32")


# Bytes. Of the eight bytes of {b, a}, the modes choose by the two low bits of c.


def permute(choose: Callable[[int], list[int]]) -> Callable[[int, int, int], int]:
    """`choose` gives the source byte of each result byte, the lowest first; 8 is added where its sign is wanted."""

    def bytes_of(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        result = 0
        for i, s in enumerate(choose(c)):
            value = source[s & 7]
            result |= (value if s < 8 else 255 * (value >> 7)) << (8 * i)
        return result

    return bytes_of


MODES: dict[str, Callable[[int], list[int]]] = {
    "": lambda c: [c >> at & 15 for at in (0, 4, 8, 12)],
    ".f4e": lambda c: [(c % 4 + i) % 8 for i in range(4)],
    ".b4e": lambda c: [(c % 4 - i) % 8 for i in range(4)],
    ".rc8": lambda c: [c % 4] * 4,
    ".ecl": lambda c: [max(i, c % 4) for i in range(4)],
    ".ecr": lambda c: [min(i, c % 4) for i in range(4)],
    ".rc16": lambda c: [c % 2 * 2, c % 2 * 2 + 1] * 2,
}
for _mode, _choose in MODES.items():
    register(f"prmt.b32{_mode}", permute(_choose), "u32", "u32", "u32", "u32")


# lop3, with each of the 256 tables


def tables(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    result = []
    for table in range(256):
        value = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        result.append(value)
    return np.array(result)


_random = rng(31).integers(0, 2**32, (3, 64), np.uint64).astype(np.uint32)
elementwise("integer", "lop3.b32", list(_random), np.uint32, tables)


# Carries, across three words


def words(values: list[int], count: int) -> np.ndarray:
    return np.array([[v >> 32 * i & 0xFFFFFFFF for i in range(count)] for v in values], np.uint32)


def long_operands(count: int, seed: int) -> list[int]:
    top = 2 ** (32 * count)
    noise = [int.from_bytes(rng(seed + i).bytes(4 * count), "little") for i in range(50)]
    edges = [0, 1, top - 1, 2**32 - 1, 2**32, *(top - 1 >> i for i in range(9))]
    return [v % top for v in [*edges, *noise][:64]]


@form("add.cc addc.cc addc", "integer")
def carried_sum(machine: Machine) -> None:
    a, b = long_operands(3, 1), long_operands(3, 99)[::-1]
    got = np.zeros((64, 3), np.uint32)
    machine.launch("integer", "add_cc", 1, 64, words(a, 3), words(b, 3), got)
    same_bits(got, words([x + y for x, y in zip(a, b, strict=True)], 3))


@form("sub.cc subc.cc subc", "integer")
def carried_difference(machine: Machine) -> None:
    a, b = long_operands(3, 1), long_operands(3, 99)[::-1]
    got = np.zeros((64, 3), np.uint32)
    machine.launch("integer", "sub_cc", 1, 64, words(a, 3), words(b, 3), got)
    same_bits(got, words([x - y for x, y in zip(a, b, strict=True)], 3))


@form("mad.lo.cc madc.hi", "integer")
def carried_product(machine: Machine) -> None:
    a, b, c = long_operands(1, 1), long_operands(1, 99)[::-1], long_operands(2, 7)
    got = np.zeros((64, 2), np.uint32)
    machine.launch("integer", "mad_cc", 1, 64, words(a, 1), words(b, 1), words(c, 2), got)
    same_bits(got, words([x * y + z for x, y, z in zip(a, b, c, strict=True)], 2))
