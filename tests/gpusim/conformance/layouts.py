"""Where the elements of a matrix are: in the registers of a warp, and in shared memory.

Written from the PTX ISA: fragments of mma and wgmma; ldmatrix; the canonical layouts and strides of wgmma's operands;
the swizzles of tensor copies. A fragment is given as two arrays [lane, element], of row and column, the elements in the
order of the registers, the lower half of a register first. g and t are the ISA's groupID and threadID_in_group.
"""

from __future__ import annotations

import numpy as np

Fragment = tuple[np.ndarray, np.ndarray]


def _grid(lanes: int, elements: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """g, t (column vectors, within each warp) and the number of the element (a row)."""
    lane = np.arange(lanes)[:, None] % 32
    return lane // 4, lane % 4, np.arange(elements)[None, :]


def _both(row: np.ndarray, col: np.ndarray) -> Fragment:
    return tuple(np.broadcast_arrays(row, col))  # type: ignore[return-value]


# mma.sync, by shape and what an element is


def a_16x16_half() -> Fragment:
    g, t, i = _grid(32, 8)
    return _both(g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4))


def a_16x8_half() -> Fragment:
    g, t, i = _grid(32, 4)
    return _both(g + 8 * (i // 2), 2 * t + i % 2)


def b_half(k: int) -> Fragment:
    """k x 8, k of 8 or 16."""
    g, t, i = _grid(32, k // 4)
    return _both(2 * t + i % 2 + 8 * (i // 2), g)


def a_16x8_tf32() -> Fragment:
    g, t, i = _grid(32, 4)
    return _both(g + 8 * (i % 2), t + 4 * (i // 2))


def b_tf32(k: int) -> Fragment:
    """k x 8, k of 4 or 8."""
    g, t, i = _grid(32, k // 4)
    return _both(t + 4 * i, g)


def a_16x4_tf32() -> Fragment:
    g, t, i = _grid(32, 2)
    return _both(g + 8 * i, t)


def c_16x8() -> Fragment:
    g, t, i = _grid(32, 4)
    return _both(g + 8 * (i // 2), 2 * t + i % 2)


def a_8x4_f64() -> Fragment:
    g, t, _ = _grid(32, 1)
    return _both(g, t)


def b_4x8_f64() -> Fragment:
    g, t, _ = _grid(32, 1)
    return _both(t, g)


def c_8x8_f64() -> Fragment:
    g, t, i = _grid(32, 2)
    return _both(g, 2 * t + i)


# wgmma: 128 threads, warp w of the four has rows 16 w to 16 w + 15


def _warp_rows() -> np.ndarray:
    return 16 * (np.arange(128)[:, None] // 32)


def d_64xn(n: int) -> Fragment:
    g, t, v = _grid(128, n // 2)
    return _both(_warp_rows() + g + 8 * (v // 2 % 2), 8 * (v // 4) + 2 * t + v % 2)


def a_64x16_half() -> Fragment:
    row, col = a_16x16_half()
    return np.tile(row, (4, 1)) + _warp_rows(), np.tile(col, (4, 1))


def a_64x8_tf32() -> Fragment:
    row, col = a_16x8_tf32()
    return np.tile(row, (4, 1)) + _warp_rows(), np.tile(col, (4, 1))


def to_registers(matrix: np.ndarray, fragment: Fragment) -> np.ndarray:
    """The elements of each lane, as its 32-bit registers hold them (64-bit elements fill one of 64)."""
    elements = np.ascontiguousarray(matrix[fragment])
    return elements.view(np.uint64 if matrix.itemsize == 8 else np.uint32)


def from_registers(registers: np.ndarray, fragment: Fragment, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """The matrix that the registers of all lanes make up."""
    matrix = np.zeros(shape, dtype)
    matrix[fragment] = registers.view(dtype)
    return matrix


# ldmatrix: register j of lane l is of matrix j, row l // 4, columns 2 (l % 4) and the next; transposed, the reverse


def ldmatrix(rows: np.ndarray, trans: bool) -> np.ndarray:
    """`rows` [matrix, row, column] of 16 bits -> registers [lane, matrix]."""
    tiles = rows.transpose(0, 2, 1) if trans else rows
    lane = np.arange(32)
    low, high = (tiles[:, lane // 4, 2 * (lane % 4) + i].astype(np.uint32) for i in (0, 1))
    return np.ascontiguousarray((low | high << 16).T)


# Shared memory


def swizzle(offset: np.ndarray, span: int) -> np.ndarray:
    """Byte offset after the swizzle of 32, 64 or 128 bytes: 16-byte chunks change places within the span, by an XOR
    with the number of the 128-byte line. 0: as it is."""
    return offset ^ ((offset >> 7 & (span // 16 - 1)) << 4) if span else offset


def wgmma_offsets(rows: int, depth: int, size: int, span: int, mn_major: bool, leading: int, stride: int) -> np.ndarray:
    """Byte offsets [row, k] of an operand's elements of `size` bytes, rows being those of A, or the columns of B.

    The canonical layouts: `leading` and `stride` are the byte offsets that the descriptor holds, `span` the swizzle.
    The tile begins where the swizzle's pattern does.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    chunk = 16 // size  # elements in 16 bytes
    if mn_major and span:
        wide = span // size
        offset = row % wide * size + row // wide * leading + k % 8 * span + k // 8 * stride
    elif mn_major:
        offset = row % chunk * size + row // chunk * stride + k % 8 * 16 + k // 8 * leading
    elif span:
        offset = row % 8 * span + row // 8 * stride + k * size
    else:
        offset = row % 8 * 16 + row // 8 * stride + k % chunk * size + k // chunk * leading
    return swizzle(offset, span)


def tile_of(tensor: np.ndarray, start: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """A box out of a tensor, `start` in its order; zero where that lies outside."""
    tile = np.zeros(box, tensor.dtype)
    inside = [slice(max(s, 0), max(min(s + b, n), max(s, 0))) for s, b, n in zip(start, box, tensor.shape, strict=True)]
    to = tuple(slice(i.start - s, i.stop - s) for i, s in zip(inside, start, strict=True))
    tile[to] = tensor[tuple(inside)]
    return tile


def put_tile(tensor: np.ndarray, start: tuple[int, ...], tile: np.ndarray) -> None:
    """What lies inside of the tensor is written, the rest is not."""
    where = np.argwhere(np.ones(tile.shape, bool))
    for index in where:
        target = index + np.array(start)
        if np.all((target >= 0) & (target < tensor.shape)):
            tensor[tuple(target)] = tile[tuple(index)]


def tile_to_shared(tile: np.ndarray, span: int) -> np.ndarray:
    """The bytes of a box as a tensor copy leaves them: the last axis contiguous, then swizzled."""
    plain = np.ascontiguousarray(tile).view(np.uint8).ravel()
    image = np.zeros_like(plain)
    image[swizzle(np.arange(plain.size), span)] = plain
    return image


def tile_from_shared(image: np.ndarray, box: tuple[int, ...], dtype: np.dtype, span: int) -> np.ndarray:
    """The reverse of tile_to_shared."""
    return image[swizzle(np.arange(image.size), span)].view(dtype).reshape(box)
