"""Values at the edges of every format, and random ones."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.rounding import Format


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(layout: Format, seed: int = 3, random: int = 512) -> np.ndarray:
    """Raw bits: zeros, subnormals, the least and the largest, 1 and its neighbours, ties of narrower formats, integers
    and halves, infinities, NaN, both signs; then random bits, and random values of a moderate size."""
    one = (2 ** (layout.exponent - 1) - 1) << layout.mantissa
    edges = [0, 1, 2, (1 << layout.mantissa) - 1, 1 << layout.mantissa, (1 << layout.mantissa) + 1]
    edges += [one - 1, one, one + 1, layout.infinity - 1, layout.infinity, layout.infinity + 1, layout.nan]
    for dropped in (13, 16, 29, 42, 45):  # mantissa bits that a narrower format loses
        if dropped < layout.mantissa:
            half = 1 << (dropped - 1)
            edges += [one + even * 2 * half + half + d for even in (0, 1) for d in (-1, 0, 1)]
    whole = np.array([0.5, 1.5, 2, 2.5, 3, 3.5, 127.5, 128, 255.5, 1000, 32767.5, 65504, 65519, 65520, 65536])
    large = 2.0 ** np.array([23, 24, 30, 31, 32, 33, 62, 63, 64, 65, 100])
    below = [x - 2.0**e for x, e in ((2.0**31, 7), (2.0**32, 8), (2.0**63, 39), (2.0**64, 40))]
    r = rng(seed)
    usual = np.concatenate([whole, large, below, r.standard_normal(random) * 10.0 ** r.integers(-3, 4, random)])
    if layout.bits == 64:
        usual_bits = usual.view(np.uint64)
    elif layout.bits == 32:
        usual_bits = usual.astype(np.float32).view(np.uint32)
    elif layout.exponent == 5:
        with np.errstate(over="ignore"):
            usual_bits = usual.astype(np.float16).view(np.uint16)
    else:
        usual_bits = (usual.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    edge_bits = np.array(edges, layout.dtype)
    both = np.concatenate([edge_bits, usual_bits.astype(layout.dtype)])
    noise = r.integers(0, 2**layout.bits, random, np.uint64).astype(layout.dtype)
    return np.concatenate([both, both | layout.dtype.type(layout.sign), noise])


def float_pairs(layout: Format, count: int = 2, random: int = 200) -> list[np.ndarray]:
    """Operands of one instruction: every edge against every other, then values of a like size."""
    one = (2 ** (layout.exponent - 1) - 1) << layout.mantissa
    least = 1 << layout.mantissa
    edges = [0, 1, least - 1, least, one, one + 1, layout.infinity - 1, layout.infinity, layout.nan]
    edges = np.array([*edges, *(e | layout.sign for e in edges)], layout.dtype)
    r = rng(11)
    grids = np.meshgrid(edges, edges) if count == 2 else [r.choice(edges, 600) for _ in range(count)]
    exponents = r.integers(-layout.mantissa, layout.mantissa, (count, random)) + (2 ** (layout.exponent - 1) - 1)
    exponents = np.clip(exponents, 0, 2**layout.exponent - 2)
    mantissas = r.integers(0, 2**layout.mantissa, (count, random))
    signs = r.integers(0, 2, (count, random))
    usual = ((exponents << layout.mantissa) + mantissas).astype(layout.dtype)
    usual |= signs.astype(layout.dtype) << layout.dtype.type(layout.bits - 1)
    noise = r.integers(0, 2**layout.bits, (count, random), np.uint64).astype(layout.dtype)
    return [np.concatenate([g.ravel(), usual[i], noise[i]]) for i, g in enumerate(grids)]


def integers(width: int, seed: int = 5, random: int = 256) -> np.ndarray:
    """Unsigned raw bits: around zero, around every power of two, and random of every size."""
    edges = {0, 1, 2, 3, 2**width - 1, 2**width - 2}
    edges |= {(2**e + d) % 2**width for e in range(width) for d in (-1, 0, 1)}
    r = rng(seed)
    noise = r.integers(0, 2**width, random, np.uint64) >> r.integers(0, width, random).astype(np.uint64)
    values = np.array([*sorted(edges), *(2**width - 1 - e for e in sorted(edges))], f"u{width // 8}")
    return np.concatenate([values, noise.astype(f"u{width // 8}")])


def shuffled(values: np.ndarray, seed: int) -> np.ndarray:
    return rng(seed).permutation(values)
