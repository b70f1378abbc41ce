"""ldmatrix, stmatrix, mma.sync. Products are of small whole numbers, exact in any order of additions."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance import layouts
from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.layouts import Fragment, from_registers, to_registers
from tests.gpusim.conformance.machine import Machine
from tests.gpusim.conformance.rounding import BF16, F16, F32, F64, TF32, Format, round_to


def rows_in_disorder() -> tuple[np.ndarray, np.ndarray]:
    """32 rows of 8 numbers, and which of them each lane names."""
    return rng(71).integers(0, 2**16, (32, 8)).astype(np.uint16), rng(72).permutation(32).astype(np.uint32)


def ldmatrix(count: int, trans: bool) -> None:
    @form(f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16", "matrix")
    def check(machine: Machine) -> None:
        rows, order = rows_in_disorder()
        got = np.zeros((32, count), np.uint32)
        machine.launch("matrix", f"ldmatrix_x{count}{'_trans' * trans}", 1, 32, rows, order, got)
        same_bits(got, layouts.ldmatrix(rows[order].reshape(4, 8, 8)[:count], trans))


def stmatrix(count: int, trans: bool) -> None:
    @form(f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16", "matrix_sm90")
    def check(machine: Machine) -> None:
        rows, order = rows_in_disorder()
        registers = layouts.ldmatrix(rows.reshape(4, 8, 8)[:count], trans)
        got = np.zeros((32, 8), np.uint16)
        machine.launch("matrix_sm90", f"stmatrix_x{count}{'_trans' * trans}", 1, 32, registers, order, got)
        want = np.zeros_like(got)
        want[order[: 8 * count]] = rows[: 8 * count]
        same_bits(got, want)


for _count in (1, 2, 4):
    for _trans in (False, True):
        ldmatrix(_count, _trans)
        stmatrix(_count, _trans)


@form("movmatrix.sync.aligned.m8n8.trans.b16", "matrix")
def check_movmatrix(machine: Machine) -> None:
    rows = rows_in_disorder()[0].reshape(4, 8, 8)[:1]
    got = np.zeros((32, 1), np.uint32)
    machine.launch("matrix", "movmatrix_trans", 1, 32, layouts.ldmatrix(rows, False), got)
    same_bits(got, layouts.ldmatrix(rows, True))


def encode(values: np.ndarray, layout: Format) -> np.ndarray:
    """Whole numbers as raw bits."""
    as_float = values.astype(np.float64)
    return as_float.view(np.uint64) if layout is F64 else round_to(as_float, layout)


def mma(
    instruction: str, kernel: str, result: Format, operand: Format, a_at: Fragment, b_at: Fragment, c_at: Fragment
) -> None:
    @form(f"mma.sync.aligned.{instruction}", "matrix")
    def check(machine: Machine) -> None:
        r = rng(73)
        m, k = (int(x.max()) + 1 for x in a_at)
        a, b, c = r.integers(-9, 10, (m, k)), r.integers(-9, 10, (k, 8)), r.integers(-99, 100, (m, 8))
        registers = to_registers(encode(c, result), c_at)
        machine.launch(
            "matrix",
            kernel,
            1,
            32,
            to_registers(encode(a, operand), a_at),
            to_registers(encode(b, operand), b_at),
            registers,
        )
        same_bits(from_registers(registers, c_at, (m, 8), result.dtype), encode(a @ b + c, result))


_c = layouts.c_16x8()
for _result, _operand in ((F32, F16), (F32, BF16), (F16, F16)):
    for _k, _a_at in ((16, layouts.a_16x16_half()), (8, layouts.a_16x8_half())):
        mma(
            f"m16n8k{_k}.row.col.{_result.name}.{_operand.name}.{_operand.name}.{_result.name}",
            f"mma_m16n8k{_k}_{_result.name}_{_operand.name}",
            _result,
            _operand,
            _a_at,
            layouts.b_half(_k),
            _c,
        )
for _k, _a_at in ((8, layouts.a_16x8_tf32()), (4, layouts.a_16x4_tf32())):
    mma(
        f"m16n8k{_k}.row.col.f32.tf32.tf32.f32",
        f"mma_m16n8k{_k}_f32_tf32",
        F32,
        TF32,
        _a_at,
        layouts.b_tf32(_k),
        _c,
    )
mma(
    "m8n8k4.row.col.f64.f64.f64.f64",
    "mma_m8n8k4_f64",
    F64,
    F64,
    layouts.a_8x4_f64(),
    layouts.b_4x8_f64(),
    layouts.c_8x8_f64(),
)
