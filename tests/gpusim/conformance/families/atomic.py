"""atom and red. Sums of floats are of small whole numbers, so that no order of additions is told from another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import integers, rng, shuffled
from tests.gpusim.conformance.machine import Machine
from tests.gpusim.conformance.rounding import BF16, F16, F32, F64, Format, round_to, to_float64

N = 128
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def operands(dtype: np.dtype, layout: Format | None) -> tuple[np.ndarray, np.ndarray]:
    if layout is None:
        values = integers(8 * dtype.itemsize)
        return np.resize(values, N), shuffled(values, 2)[:N]
    whole = rng(51).integers(-8, 9, (2, N * dtype.itemsize // layout.dtype.itemsize))
    memory, a = (round_to(w.astype(np.float64), layout) if layout is not F64 else w.astype(float) for w in whole)
    return memory.view(dtype), a.view(dtype)


def float_sum(layout: Format) -> Combine:
    def combine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if layout is F64:
            return (x.view(np.float64) + y.view(np.float64)).view(x.dtype)
        total = to_float64(x.view(layout.dtype), layout) + to_float64(y.view(layout.dtype), layout)
        return round_to(total, layout).view(x.dtype)

    return combine


def as_signed(function: Combine) -> Combine:
    return lambda x, y: function(x.view(f"i{x.itemsize}"), y.view(f"i{x.itemsize}")).view(x.dtype)


def scalar(name: str) -> tuple[np.dtype, Format | None, Combine]:
    """The register, the format of floats, and what is done."""
    operation, *_, kind = name.split(".")
    packed = kind.endswith("x2")
    layout = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}.get(kind.removesuffix("x2"))
    dtype = np.dtype(np.uint32) if packed else layout.dtype if layout else np.dtype(f"u{int(kind[1:]) // 8}")
    if layout:
        return dtype, layout, float_sum(layout)
    functions: dict[str, Combine] = {
        "add": lambda x, y: x + y,
        "min": np.minimum,
        "max": np.maximum,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "exch": lambda x, y: y,
        "inc": lambda x, y: np.where(x >= y, 0, x + 1).astype(x.dtype),
        "dec": lambda x, y: np.where((x == 0) | (x > y), y, x - 1).astype(x.dtype),
    }
    return dtype, None, as_signed(functions[operation]) if kind[0] == "s" else functions[operation]


def one_each(family: str, name: str, space: str) -> None:
    dtype, layout, combine = scalar(name)

    @form(f"atom.{space}.{name}", family)
    def check(machine: Machine) -> None:
        memory, a = operands(dtype, layout)
        want, old = combine(memory, a), np.zeros_like(memory)
        before = memory.copy()
        machine.launch(family, f"atom_{space}_{name.replace('.', '_')}", N // 64, 64, memory, a, old)
        same_bits(old, before)
        same_bits(memory, want)


def without_result(family: str, name: str) -> None:
    dtype, layout, combine = scalar(name)

    @form(f"red.global.{name}", family)
    def check(machine: Machine) -> None:
        memory, a = operands(dtype, layout)
        want = combine(memory, a)
        machine.launch(family, f"red_global_{name.replace('.', '_')}", N // 64, 64, memory, a)
        same_bits(memory, want)


def on_one_place(name: str) -> None:
    """In any order the same result: the operation is one that commutes."""
    dtype, layout, combine = scalar(name)

    @form(f"red.relaxed.gpu.global.{name}, all on one place", "atomic")
    def check(machine: Machine) -> None:
        memory, a = operands(dtype, layout)
        memory = memory[:1].copy()
        want = memory.copy()
        for i in range(N):
            want = combine(want, a[i : i + 1])
        machine.launch("atomic", f"red_same_{name.replace('.', '_')}", N // 64, 64, memory, a)
        same_bits(memory, want)


REDUCTIONS = ["add.u32", "add.s32", "add.u64", "add.f32", "add.f64", "add.noftz.f16", "add.noftz.f16x2"]
REDUCTIONS += [f"{op}.{kind}" for op in ("min", "max") for kind in ("s32", "u32", "s64", "u64")]
REDUCTIONS += [f"{op}.b{width}" for op in ("and", "or", "xor") for width in (32, 64)]
for _name in (*REDUCTIONS, "inc.u32", "dec.u32"):
    without_result("atomic", _name)
for _name in REDUCTIONS:
    on_one_place(_name)
for _name in (*REDUCTIONS, "inc.u32", "dec.u32", "exch.b32", "exch.b64"):
    one_each("atomic", _name, "global")
    one_each("atomic", _name, "shared")
for _name in ("add.noftz.bf16", "add.noftz.bf16x2"):
    without_result("atomic_sm90", _name)
    one_each("atomic_sm90", _name, "global")


def vector(name: str) -> None:
    """Several numbers, each added by itself."""
    _, *_, width, kind = name.split(".")
    count = int(width[1:])
    dtype, layout, combine = scalar(f"add.{kind}")

    def given() -> tuple[np.ndarray, np.ndarray]:
        columns = [operands(dtype, layout) for _ in range(count)]
        return tuple(np.concatenate([shuffled(c[i], k) for k, c in enumerate(columns)]) for i in (0, 1))

    @form(f"red.global.{name}", "atomic_sm90")
    def check(machine: Machine) -> None:
        memory, a = given()
        want = combine(memory, a)
        machine.launch("atomic_sm90", f"red_global_{name.replace('.', '_')}", N // 64, 64, memory, a)
        same_bits(memory, want)

    @form(f"atom.global.{name}", "atomic_sm90")
    def check_old(machine: Machine) -> None:
        memory, a = given()
        want, before, old = combine(memory, a), memory.copy(), np.zeros_like(memory)
        machine.launch("atomic_sm90", f"atom_global_{name.replace('.', '_')}", N // 64, 64, memory, a, old)
        same_bits(old, before)
        same_bits(memory, want)


for _name in ("add.v2.f32", "add.v4.f32"):
    vector(_name)
for _kind in ("f16x2", "bf16x2"):
    vector(f"add.noftz.v2.{_kind}")
    vector(f"add.noftz.v4.{_kind}")


def compare_and_swap(width: int) -> None:
    @form(f"atom.global.cas.b{width}", "atomic")
    def check(machine: Machine) -> None:
        memory, value = operands(np.dtype(f"u{width // 8}"), None)
        compare = np.where(np.arange(N) % 3 == 0, memory, memory ^ memory.dtype.type(1))
        before, old = memory.copy(), np.zeros_like(memory)
        machine.launch("atomic", f"atom_cas_b{width}", N // 64, 64, memory, compare, value, old)
        same_bits(old, before)
        same_bits(memory, np.where(before == compare, value, before))


for _width in (16, 32, 64):
    compare_and_swap(_width)


@form("atom.acq_rel.gpu.global.add.u32, tickets", "atomic")
def check_tickets(machine: Machine) -> None:
    counter, drawn = np.zeros(1, np.uint32), np.zeros(512, np.uint32)
    machine.launch("atomic", "tickets", 8, 64, counter, drawn)
    assert counter[0] == 512
    same_bits(drawn, np.ones_like(drawn))
