"""What sm_90 adds: mbarrier, bulk copies, tiles by tensor map."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.gpusim.build import compile_ptx, load_simulator
from tests.gpusim.simulator import PtxModule, Simulator, SimulatorError

pytestmark = pytest.mark.sim
KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return load_simulator()


@pytest.fixture(scope="module")
def hopper(simulator: Simulator) -> PtxModule:
    return simulator.load_ptx(compile_ptx(KERNELS / "hopper.cu"))


@pytest.fixture(params=[(0, "late"), (0, "at_once"), (1, "late"), (2, "random"), (3, "random")], ids=str, autouse=True)
def order(simulator: Simulator, request: pytest.FixtureRequest):
    seed, arrival = request.param
    with simulator.using(seed=seed, arrival=arrival, checks=True):
        yield request.param


def aligned(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n + 128, np.uint8)
    return raw[-raw.ctypes.data % 128 :][:n].view(dtype).reshape(shape)


def test_ring(hopper: PtxModule) -> None:
    values = np.arange(7 * 32, dtype=np.float32)
    out = np.zeros_like(values)
    hopper.launch("ring", 1, 64, values, out, np.int32(7))
    np.testing.assert_array_equal(out, values.reshape(7, 32)[:, ::-1].ravel())


def test_ring_broken(hopper: PtxModule) -> None:
    values = np.arange(7 * 32, dtype=np.float32)
    with pytest.raises(SimulatorError, match=r"race on shared memory|more arrivals at an mbarrier|deadlock"):
        hopper.launch("ring_broken", 1, 64, values, np.zeros_like(values), np.int32(7))


def test_bulk_copy(hopper: PtxModule) -> None:
    values, out = aligned(256, np.float32), aligned(256, np.float32)
    values[:] = np.arange(256)
    hopper.launch("bulk_copy", 1, 64, values, out)
    np.testing.assert_array_equal(out, values * 2)


def test_bulk_copy_broken(hopper: PtxModule) -> None:
    with pytest.raises(SimulatorError, match=r"before the wait|race on shared memory"):
        hopper.launch("bulk_copy_broken", 1, 64, aligned(256, np.float32), aligned(256, np.float32))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (24, 5), (-8, -3), (48, 30)])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_copy(simulator: Simulator, hopper: PtxModule, swizzle: int, x: int, y: int) -> None:
    rows, cols, box_rows, box_cols = 33, 64, 16, (swizzle or 128) // 2
    source, target, raw = (
        aligned((rows, cols), np.uint16),
        aligned((rows, cols), np.uint16),
        aligned(box_rows * box_cols // 2, np.uint32),
    )
    source[:] = np.arange(1, rows * cols + 1).reshape(rows, cols)
    maps = [simulator.encode_tiled(a, (box_rows, box_cols), swizzle) for a in (source, target)]
    for a in (source, target):
        simulator.register(a)
    size = box_rows * box_cols * 2
    hopper.launch("tensor_copy", 1, 32, *maps, raw, np.int32(x), np.int32(y), np.int32(size), shared=size + 1024)
    for a in (source, target):
        simulator.unregister(a)

    padded = np.zeros((rows + 64, cols + 128), np.uint16)
    padded[32 : 32 + rows, 64 : 64 + cols] = source
    tile = padded[32 + y : 32 + y + box_rows, 64 + x : 64 + x + box_cols]
    chunks = box_cols // 8
    seen = raw.view(np.uint16).reshape(box_rows, chunks, 8)
    expected = np.empty_like(seen)
    for r in range(box_rows):
        for c in range(chunks):
            flip = {0: 0, 32: r >> 2 & 1, 64: r >> 1 & 3, 128: r & 7}[swizzle]
            expected[r, c ^ flip] = tile[r, c * 8 : c * 8 + 8]
    np.testing.assert_array_equal(seen, expected)
    inside = np.zeros_like(padded)
    inside[32 + y : 32 + y + box_rows, 64 + x : 64 + x + box_cols] = tile
    np.testing.assert_array_equal(target, inside[32 : 32 + rows, 64 : 64 + cols])


def run_gemm(simulator: Simulator, module: PtxModule) -> None:
    """C = A B' of small whole numbers, exact."""
    k = 320
    rng = np.random.default_rng(5)
    a, b, c = aligned((64, k), np.float16), aligned((32, k), np.float16), aligned((64, 32), np.float32)
    a[:], b[:] = rng.integers(-4, 5, a.shape), rng.integers(-4, 5, b.shape)
    maps = [
        simulator.encode_tiled(x, box, swizzle)
        for x, box, swizzle in ((a, (64, 64), 128), (b, (32, 64), 128), (c, (64, 32), 0))
    ]
    for x in (a, b, c):
        simulator.register(x)
    try:
        module.launch("gemm", 1, 160, *maps, np.int32(k), shared=24576 + 8192)
    finally:
        for x in (a, b, c):
            simulator.unregister(x)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)


def test_gemm(simulator: Simulator, hopper: PtxModule) -> None:
    run_gemm(simulator, hopper)


def small_kernel(body: str) -> str:
    """A kernel without parameters, for one warp."""
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k()
{{
 .reg .b32 %r<9>; .reg .b64 %d<9>; .shared .align 128 .b8 tile[128]; .shared .align 8 .b64 bar;
 mov.u32 %r0, 0; mov.u64 %d0, 64; mov.u32 %r1, tile; mov.u32 %r2, bar;
 {body}
 ret;
}}
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d0, {%r0}], [%r2];",
        "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d0, {%r0}], [%r1];",
        "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%d0, {%r0}];",
    ],
)
def test_no_tensor_map(simulator: Simulator, instruction: str) -> None:
    module = simulator.load_ptx(small_kernel(instruction))
    with pytest.raises(SimulatorError, match="no tensor map at the address given: 0x40 is"):
        module.launch("k", 1, 1)


def test_copy_of_nothing(simulator: Simulator) -> None:
    """No bytes, in either direction."""
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 0, [%r2];"
    store = "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 0;"
    begin = "mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster; ld.param.u64 %d1, [p];"
    text = small_kernel(f"{begin} {load} {store}").replace("entry k()", "entry k(.param .u64 p)")
    simulator.load_ptx(text).launch("k", 1, 1, aligned(4, np.float32))


def test_cache_policy(simulator: Simulator) -> None:
    """There are no caches: a policy says nothing."""
    text = small_kernel(
        "createpolicy.fractional.L2::evict_last.b64 %d1, 1.0; createpolicy.fractional.L2::evict_first.b64 %d2;"
        "ld.param.u64 %d3, [p]; ld.global.L2::cache_hint.b32 %r3, [%d3], %d1;"
        "st.global.L2::cache_hint.b32 [%d3+4], %r3, %d2;"
    ).replace("entry k()", "entry k(.param .u64 p)")
    values = aligned(4, np.float32)
    values[0] = 3
    simulator.load_ptx(text).launch("k", 1, 1, values)
    assert values[1] == 3


@pytest.mark.parametrize(
    ("instruction", "report"),
    [
        ("max.f32 %r3, %r0, %r0, %r0;", "three-input min and max"),
        ("createpolicy.range.global.L2::evict_last.b64 %d1, [%d0], 64, 128;", "createpolicy.range"),
        (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 16, [%r2];",
            "within shared memory",
        ),
        ("bmsk.clamp.b32 %r3, %r0, %r1;", "'bmsk.clamp.b32' is not known"),
    ],
)
def test_not_there(simulator: Simulator, instruction: str, report: str) -> None:
    with pytest.raises(SimulatorError, match=f"(?s){report}.*{instruction.split('.')[0]}"):
        simulator.load_ptx(small_kernel(instruction)).launch("k", 1, 1)


SYNCHRONISING = re.compile(r"^\s*(mbarrier\.|fence\.|bar\.|wgmma\.(fence|commit|wait)|cp\.async\.bulk\.(commit|wait))")


def gemm_deletions(ptx: str) -> dict[str, str]:
    """The kernel without one of its synchronising instructions, for each of them."""
    lines = ptx.splitlines()
    begin = next(i for i, line in enumerate(lines) if ".entry gemm(" in line)
    end = next((i for i in range(begin + 1, len(lines)) if ".entry" in lines[i]), len(lines))
    found: dict[str, str] = {}
    for i in range(begin, end):
        if not SYNCHRONISING.match(lines[i]):
            continue
        # a wait that is not there has succeeded
        instead = re.sub(r"^\s*mbarrier\.try_wait\S* (\w+),.*", r"setp.eq.u32 \1, 0, 0;", lines[i])
        name = f"{i - begin} {lines[i].strip().split(' ')[0]}"
        found[name] = "\n".join([*lines[:i], instead if instead != lines[i] else "", *lines[i + 1 :]])
    return found


GEMM_PTX = functools.cache(lambda: gemm_deletions(compile_ptx(KERNELS / "hopper.cu")))


def test_gemm_deletions(simulator: Simulator, order: tuple[int, str]) -> None:
    """Deleting any synchronising instruction is noticed in each order."""
    survived = []
    deletions = GEMM_PTX()
    for name, ptx in deletions.items():
        try:
            run_gemm(simulator, simulator.load_ptx(ptx))
        except (SimulatorError, AssertionError):
            continue
        survived.append(name)
    assert len(deletions) > 15
    assert not survived


SPAN = {0: 16, 32: 32, 64: 64, 128: 128}
MODE = {0: 0, 128: 1, 64: 2, 32: 3}


def swizzle_image(matrix: np.ndarray, swizzle: int, at: int) -> np.ndarray:
    """Bytes of a row-major matrix as slabs of `swizzle` bytes a row (cores of 8 rows x 16 bytes without swizzle)."""
    rows, size = matrix.shape[0], matrix.itemsize
    columns = SPAN[swizzle] // size
    image = np.zeros(matrix.nbytes, np.uint8)
    for slab in range(matrix.shape[1] // columns):
        for r in range(rows):
            for chunk in range(SPAN[swizzle] // 16):
                flip = {0: 0, 32: r >> 2 & 1, 64: r >> 1 & 3, 128: r & 7}[swizzle]
                to = slab * rows * SPAN[swizzle] + r * SPAN[swizzle] + (chunk ^ flip) * 16
                first = slab * columns + chunk * 16 // size
                image[to : to + 16] = matrix[r, first : first + 16 // size].copy().view(np.uint8)
    assert at % 1024 == 0
    return image


def descriptor(at: int, swizzle: int, rows: int, transposed: bool) -> int:
    """`rows` of the stored matrix; slabs follow each other after rows * span bytes."""
    slab, atom = rows * SPAN[swizzle], 8 * SPAN[swizzle]
    leading, stride = (slab, atom) if swizzle or not transposed else (atom, slab)
    return (at & 0x3FFFF) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODE[swizzle] << 62


def as_float(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("a_from", ["shared", "registers"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["K-major", "MN-major"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_wgmma(simulator: Simulator, swizzle: int, transposed: bool, kind: str, a_from: str) -> None:
    if kind == "tf32" and transposed:
        return  # 16-bit types only
    n, k, size = 64, 8 if kind == "tf32" else 16, 4 if kind == "tf32" else 2
    rng = np.random.default_rng(3)

    def values(shape: tuple[int, int]) -> np.ndarray:
        x = rng.integers(-8, 9, shape).astype(np.float32)
        if kind == "f16":
            return x.astype(np.float16).view(np.uint16)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else x.view(np.uint32)

    # stored rows: mn for K-major, with k wide enough for a whole span; k for MN-major
    wide = max(k, SPAN[swizzle] // size)
    a, b = (values((k, 64)), values((k, n))) if transposed else (values((64, wide)), values((n, wide)))
    a_at, b_at = 1024, 1024 + 16384
    memory = np.zeros(32768, np.uint8)
    for matrix, at in ((a, a_at), (b, b_at)):
        memory[at - 1024 :][: matrix.nbytes] = swizzle_image(matrix, swizzle, at)
    exact_a, exact_b = (as_float(m, kind) for m in (a, b))
    exact_a, exact_b = (exact_a.T, exact_b.T) if transposed else (exact_a[:, :k], exact_b[:, :k])

    registers = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        flat = np.ascontiguousarray(a.T if transposed else a[:, :k])
        for i in range(4):
            row = 16 * warp + g + 8 * (i & 1)
            if size == 4:
                registers[thread, i] = flat[row, t + 4 * (i >> 1)]
            else:
                col = 2 * t + 8 * (i >> 1)
                registers[thread, i] = int(flat[row, col]) | int(flat[row, col + 1]) << 16
    start = np.ones((128, n // 2), np.float32)
    d_list = "{" + ",".join(f"%f{v}" for v in range(n // 2)) + "}"
    a_operand = "%da" if a_from == "shared" else "{%r1,%r2,%r3,%r4}"
    major = int(transposed)
    flags = "" if kind == "tf32" else (f", {major}, {major}" if a_from == "shared" else f", {major}")
    text = f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 image, .param .u64 regs, .param .u64 out, .param .u64 da, .param .u64 db)
{{
 .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b64 %da; .reg .b64 %db; .reg .f32 %f<{n // 2}>; .reg .pred %p<3>;
 .shared .align 1024 .b8 mem[32768];
 ld.param.u64 %da, [da]; ld.param.u64 %db, [db];
 ld.param.u64 %d1, [image]; ld.param.u64 %d2, [regs]; ld.param.u64 %d3, [out];
 mov.u32 %r5, %tid.x; mov.u32 %r6, mem; mul.wide.u32 %d4, %r5, 16; add.s64 %d2, %d2, %d4;
 ld.global.v4.b32 {{%r1,%r2,%r3,%r4}}, [%d2];
 shl.b32 %r7, %r5, 2; add.s32 %r6, %r6, %r7; cvt.u64.u32 %d5, %r7; add.s64 %d1, %d1, %d5; mov.u32 %r7, 0;
LOOP:
 ld.global.b32 %r8, [%d1]; st.shared.b32 [%r6], %r8; add.s64 %d1, %d1, 512; add.s32 %r6, %r6, 512; add.s32 %r7, %r7, 1;
 setp.lt.s32 %p1, %r7, 64; @%p1 bra LOOP;
 fence.proxy.async.shared::cta; bar.sync 0;
 mul.wide.u32 %d6, %r5, {n * 2}; add.s64 %d3, %d3, %d6;
{chr(10).join(f" ld.global.f32 %f{v}, [%d3+{4 * v}];" for v in range(n // 2))}
 setp.eq.s32 %p2, %r7, %r7;
 wgmma.fence.sync.aligned;
 wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {d_list}, {a_operand}, %db, %p2, 1, 1{flags};
 wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{chr(10).join(f" st.global.f32 [%d3+{4 * v}], %f{v};" for v in range(n // 2))}
 ret;
}}
"""
    da, db = descriptor(a_at, swizzle, a.shape[0], transposed), descriptor(b_at, swizzle, b.shape[0], transposed)
    simulator.load_ptx(text).launch("k", 1, 128, memory, registers, start, np.uint64(da), np.uint64(db))

    result = np.zeros((64, n))
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for v in range(n // 2):
            result[16 * warp + g + 8 * (v >> 1 & 1), 8 * (v >> 2) + 2 * t + (v & 1)] = start[thread, v]
    np.testing.assert_array_equal(result, 1 + exact_a @ exact_b.T)
