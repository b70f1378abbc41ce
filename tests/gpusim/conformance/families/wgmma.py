"""wgmma: every N, every swizzle and major-ness, both places of A. Products of small whole numbers are exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.gpusim.conformance import layouts
from tests.gpusim.conformance.families.matrix import encode
from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.layouts import from_registers, to_registers
from tests.gpusim.conformance.machine import Machine
from tests.gpusim.conformance.rounding import BF16, F16, F32, TF32, Format

SWIZZLE_BITS = {0: 0, 128: 1, 64: 2, 32: 3}
POISON = 0xFF  # a NaN wherever it is read


@dataclass(frozen=True)
class Operand:
    """How a matrix of rows x k lies in shared memory."""

    rows: int
    k: int
    size: int
    swizzle: int
    mn_major: bool
    slabs_first: bool = True  # which of the two strides is the short one, where there is a choice

    @property
    def strides(self) -> tuple[int, int]:
        """Leading and stride byte offsets, of the next pattern in either direction."""
        pattern = 8 * (self.swizzle or 16)  # bytes of 8 rows (or k) of the swizzle's span
        if not self.mn_major and self.swizzle:
            slab = self.swizzle // self.size
            assert self.k <= slab
            return 16, pattern
        wide = (self.swizzle or 16) // self.size
        if self.mn_major:
            along_mn, along_k = -(-self.rows // wide), self.k // 8
        else:
            along_mn, along_k = self.rows // 8, self.k // wide
        to_k, to_mn = (pattern, pattern * along_k) if self.slabs_first else (pattern * along_mn, pattern)
        # Without a swizzle the leading offset is the one along k, and for MN-major swizzles the one along MN.
        return (to_mn, to_k) if self.swizzle else (to_k, to_mn)

    def offsets(self) -> np.ndarray:
        leading, stride = self.strides
        return layouts.wgmma_offsets(self.rows, self.k, self.size, self.swizzle, self.mn_major, leading, stride)

    def image(self, matrix: np.ndarray) -> np.ndarray:
        """The bytes of a rows x k matrix, the rest poisoned; whole patterns of 1024 bytes."""
        offsets = self.offsets()
        image = np.full(-(-(int(offsets.max()) + self.size) // 1024) * 1024, POISON, np.uint8)
        image.view(matrix.dtype)[offsets // self.size] = matrix
        return image

    def descriptor(self, start: int, step: int, depth: int) -> int:
        """All but the address of the tile: `start` is where it begins in the image."""
        leading, stride = self.strides
        if self.mn_major:
            skip = step * depth // 8 * (stride if self.swizzle else leading)
        elif self.swizzle:
            skip = step * depth * self.size
        else:
            skip = step * depth * self.size // 16 * leading
        return (start + skip) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLE_BITS[self.swizzle] << 62


def wgmma(
    kernel: str,
    n: int,
    operand: Format,
    swizzle: int,
    result: Format = F32,
    mn_a: bool = False,
    mn_b: bool = False,
    registers: bool = False,
    slabs_first: bool = True,
    signs: int = 1,
) -> None:
    size = operand.dtype.itemsize
    depth = 32 // size
    some_k_major = not mn_b or not (mn_a or registers)
    k = swizzle // size if swizzle and some_k_major else 2 * depth
    a_place = Operand(64, k, size, 0 if registers else swizzle, mn_a, slabs_first)
    b_place = Operand(n, k, size, swizzle, mn_b, slabs_first)
    kind = f"m64n{n}k{depth}.{result.name}.{operand.name}.{operand.name}"
    where = "A in registers" if registers else f"A {'MN' if mn_a else 'K'}-major"
    strides = "" if slabs_first else ", the other stride short"
    negated = "" if signs == 1 else f", {kernel.rsplit('_', maxsplit=1)[-1]} negated"
    name = f"wgmma.mma_async {kind}, {where}, B {'MN' if mn_b else 'K'}-major, swizzle {swizzle or 'none'}"

    @form(name + strides + negated, "wgmma_sm90")
    def check(machine: Machine) -> None:
        r = rng(n + swizzle)
        a, b, c = r.integers(-5, 6, (64, k)), r.integers(-5, 6, (n, k)), r.integers(-99, 100, (64, n))
        images = [place.image(encode(x, operand)) for place, x in ((a_place, a), (b_place, b))]
        image = np.concatenate(images)
        d_at = layouts.d_64xn(n)
        for step in range(k // depth):
            part = slice(step * depth, (step + 1) * depth)
            fragment_at = layouts.a_64x8_tf32() if operand is TF32 else layouts.a_64x16_half()
            fragment = to_registers(encode(a[:, part], operand), fragment_at)
            for scale_d in (1, 0):
                accumulators = to_registers(encode(c, result), d_at)
                machine.launch(
                    "wgmma_sm90",
                    kernel,
                    1,
                    128,
                    image,
                    np.uint32(image.nbytes),
                    np.uint64(a_place.descriptor(0, step, depth)),
                    np.uint64(b_place.descriptor(images[0].size, step, depth)),
                    fragment,
                    accumulators,
                    np.uint32(scale_d),
                    shared=image.nbytes + 1024,
                )
                want = signs * (a[:, part] @ b[:, part].T) + scale_d * c
                got = from_registers(accumulators, d_at, (64, n), result.dtype)
                same_bits(got, encode(want, result))


for _n in range(8, 257, 8):
    wgmma(f"ss_n{_n}_f32_f16", _n, F16, 128)
for _swizzle in (0, 32, 64, 128):
    for _n in (8, 64, 96, 128, 256):
        wgmma(f"ss_n{_n}_f32_bf16", _n, BF16, _swizzle)
    for _n in (8, 64, 128, 256):
        wgmma(f"ss_n{_n}_f32_tf32", _n, TF32, _swizzle)
        wgmma(f"rs_n{_n}_f32_tf32", _n, TF32, _swizzle, registers=True)
    for _operand in (F16, BF16):
        for _n in (64, 128, 256):
            _kernel = f"n{_n}_f32_{_operand.name}"
            for _mn_a, _mn_b in ((True, False), (False, True), (True, True)):
                _suffix = f"_{'mn' if _mn_a else 'k'}_{'mn' if _mn_b else 'k'}"
                wgmma(f"ss_{_kernel}{_suffix}", _n, _operand, _swizzle, mn_a=_mn_a, mn_b=_mn_b)
            wgmma(f"rs_{_kernel}", _n, _operand, _swizzle, registers=True)
            wgmma(f"rs_{_kernel}_mn", _n, _operand, _swizzle, mn_b=True, registers=True)
        wgmma(f"rs_n8_f32_{_operand.name}", 8, _operand, _swizzle, registers=True)
    for _n in (16, 64, 256):
        wgmma(f"ss_n{_n}_f16_f16", _n, F16, _swizzle, result=F16)
    wgmma("ss_n128_f32_bf16_mn_mn", 128, BF16, _swizzle, mn_a=True, mn_b=True, slabs_first=False)
for _swizzle in (0, 32, 64):
    for _n in (8, 64, 136, 256):
        wgmma(f"ss_n{_n}_f32_f16", _n, F16, _swizzle)
wgmma("ss_n64_f32_bf16", 64, BF16, 0, slabs_first=False)
wgmma("ss_n64_f32_f16_negated_a", 64, F16, 128, signs=-1)
wgmma("ss_n64_f32_f16_negated_b", 64, F16, 128, signs=-1)
