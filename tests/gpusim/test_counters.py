"""Counters of kernels whose numbers can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpusim.build import load_simulator
from tests.gpusim.simulator import LaunchRecord

pytestmark = pytest.mark.sim

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def run(body: str, shared: int = 4096, threads: int = 32) -> LaunchRecord:
    """Run PTX statements with %lane (32-bit) and the address of 8 KiB in %base."""
    registers = " .reg .b32 %r<20>;\n .reg .b64 %d<9>;\n .reg .b64 %base;\n .reg .b32 %lane;\n"
    start = " ld.param.u64 %base, [data];\n mov.u32 %lane, %tid.x;\n mov.u32 %r0, mem;\n"
    memory = f" .shared .align 128 .b8 mem[{shared}];\n"
    text = f"{HEAD}.visible .entry k(.param .u64 data)\n{{\n{registers}{memory}{start}{body}\n ret;\n}}\n"
    simulator = load_simulator()
    data = np.zeros(2048 + 32, np.uint32)
    data = data[(-data.ctypes.data // 4) % 32 :][:2048]
    simulator.take_records()
    with simulator.using(uninitialized=False):
        simulator.load_ptx(text).launch("k", 1, threads, data)
    return simulator.take_records()[0]


@pytest.mark.parametrize(
    ("stride", "kind", "wavefronts", "ideal"),
    [
        (4, "b32", 1, 1),
        (8, "b32", 2, 1),
        (128, "b32", 32, 1),
        (0, "b32", 1, 1),
        (132, "b32", 1, 1),
        (8, "v2.b32", 2, 2),
        (16, "v2.b32", 4, 2),
        (16, "v4.b32", 4, 4),
        (32, "v4.b32", 8, 4),
        (128, "v4.b32", 32, 4),
        (144, "v4.b32", 4, 4),
    ],
)
def test_wavefronts(stride: int, kind: str, wavefronts: int, ideal: int) -> None:
    n = {"b32": 1, "v2.b32": 2, "v4.b32": 4}[kind]
    registers = "{" + ", ".join(f"%r{10 + i}" for i in range(n)) + "}" if n > 1 else "%r10"
    record = run(f" mad.lo.s32 %r1, %lane, {stride}, %r0;\n ld.shared.{kind} {registers}, [%r1];", shared=8192)
    assert (record.shared_load_requests, record.shared_load_wavefronts, record.shared_load_ideal) == (
        1,
        wavefronts,
        ideal,
    )


def test_ldmatrix_phases() -> None:
    straight = run(
        " mad.lo.s32 %r1, %lane, 16, %r0;\n ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2,%r3,%r4,%r5}, [%r1];"
    )
    assert (straight.shared_load_wavefronts, straight.shared_load_ideal) == (4, 4)
    column = run(
        " mad.lo.s32 %r1, %lane, 128, %r0;\n ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2,%r3,%r4,%r5}, [%r1];"
    )
    assert (column.shared_load_wavefronts, column.shared_load_ideal) == (32, 4)


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (0, 1)])
def test_sectors(stride: int, sectors: int) -> None:
    address = f" mul.wide.s32 %d1, %lane, {stride};\n add.s64 %d2, %base, %d1;\n"
    record = run(address + " ld.global.b32 %r1, [%d2];\n st.global.b32 [%d2], %r1;")
    assert (record.global_load_sectors, record.global_load_bytes) == (sectors, 128)
    assert (record.global_store_sectors, record.global_store_bytes) == (sectors, 128)


def test_instructions_and_tensor_work() -> None:
    accumulators, a, b = "{%r1,%r2,%r3,%r4}", "{%r5,%r6,%r7,%r8}", "{%r9,%r10}"
    mma = f" mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {accumulators}, {a}, {b}, {accumulators};"
    record = run(mma * 3 + " bar.sync 0;\n ex2.approx.ftz.f32 %r1, %r2;", threads=64)
    assert record.tensor_flops == 2 * 3 * 2 * 16 * 8 * 16
    assert record.instructions["tensor_core"] == 6
    assert record.instructions["special_function"] == 2
    assert record.barriers == 2


def test_a_blocked_instruction_counts_once() -> None:
    # half of the warp reaches bar.warp first and waits there
    body = " setp.lt.s32 %p1, %lane, 16;\n @%p1 bra SKIP;\n add.s32 %r1, %r1, 1;\nSKIP:\n bar.warp.sync 0xffffffff;"
    record = run(" .reg .pred %p1;\n" + body)
    assert record.instructions["synchronization"] == 1
