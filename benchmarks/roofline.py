"""How long a case must take: its floating-point operations and its bytes over what the machine was measured to do.

Conventions, the usual ones: a causal mask halves the operations, other masks count what they leave visible, a backward
pass costs 2.5 forward passes of attention (five matrix products against two) and twice the forward of a plain product.
Bytes count every operand once, as if everything between input and output stayed on the chip.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.cases import Case
from benchmarks.peak import load_loops

__all__ = ["Ceilings", "case_bytes", "case_flops", "measure_ceilings"]

ATTENTION = ("attention", "mask", "decode", "call")  # the kinds of case that are attention as such


def attention_flops(case: Case) -> float:
    """4 D per visible pair of the two products of the forward; times 3.5 with the backward."""
    preset = case.preset
    return 4.0 * case.batch * preset.num_heads * case.visible * preset.head_dim * (3.5 if case.training else 1.0)


def attention_bytes(case: Case) -> float:
    """Forward: q, k, v, mask in, out and fp32 logsumexp out. Backward: these and grad_out in, three gradients out."""
    preset, item = case.preset, case.dtype.itemsize
    query = item * case.batch * preset.num_heads * case.queries * preset.head_dim  # also out and their gradients
    key = item * case.batch * preset.num_kv_heads * case.length * preset.head_dim  # also value and their gradients
    lse = 4 * case.batch * preset.num_heads * case.queries
    matrix = {"bias": item * preset.num_heads, "bool": 1}.get(case.mask, 0) * case.queries * case.length
    forward = 2 * query + 2 * key + lse + matrix
    backward = (3 * query + 2 * key + lse + matrix) + (query + 2 * key)
    return float(forward + backward if case.training else forward)


def case_flops(case: Case) -> float:
    """Floating-point operations by the conventions above; 0 where a case only moves bytes."""
    preset, tokens = case.preset, case.batch * case.length
    attention = attention_flops(case)
    times = 3.0 if case.training else 1.0  # a product's backward is two products
    if case.kind in ATTENTION:
        return attention
    if case.kind == "module":  # three input projections and one output projection
        return attention + times * 8.0 * tokens * preset.embed_dim**2
    if case.kind in ("attention_scores", "attention_output"):  # the whole matrix, whatever the mask
        return times * 2.0 * tokens * preset.num_heads * case.length * preset.head_dim
    return 0.0


def case_bytes(case: Case) -> float:
    """Fewest bytes through device memory."""
    preset, item = case.preset, case.dtype.itemsize
    tokens = case.batch * case.length
    if case.kind in ATTENTION:
        return attention_bytes(case)
    if case.kind == "module":  # x, out and the weights; backward: x, grad_out, weights in, grad_x, grad_weights out
        stream, weights = tokens * preset.embed_dim, 4 * preset.embed_dim**2
        return float(item * (2 * stream + weights + (3 * stream + 2 * weights if case.training else 0)))
    query, key = tokens * preset.num_heads * preset.head_dim, tokens * preset.num_kv_heads * preset.head_dim
    scores = tokens * preset.num_heads * case.length
    if case.kind == "qkv_split":  # one read, one write, and the same again backward
        elements = 2 * (query + 2 * key) * (2 if case.training else 1)
    elif case.kind == "masked_softmax":  # backward: weights and their gradient in, gradient of the scores out
        elements = 2 * scores + (3 * scores if case.training else 0)
    else:  # one operand of size query, one of size key, scores; backward: all three in, two gradients out
        elements = query + key + scores
        elements += {
            "attention_scores": scores + 2 * query + 2 * key,
            "attention_output": 2 * scores + query + 2 * key,
        }[case.kind] * (1 if case.training else 0)
    return float(item * elements)


@dataclass(frozen=True)
class Ceilings:
    """What the machine was measured to do."""

    bytes_per_second: float
    flops_per_second: dict[torch.dtype, float]
    how: str  # in words, with the figures

    def floor_seconds(self, case: Case) -> float:
        """The larger of the time for the operations and the time for the bytes."""
        return max(
            case_flops(case) / self.flops_per_second[case.dtype],
            case_bytes(case) / self.bytes_per_second,
        )


def measure_ceilings(device: torch.device, dtypes: Iterable[torch.dtype]) -> tuple[Ceilings | None, str]:
    """What the device does at most in these dtypes; None and why where that cannot be measured."""
    return gpu_ceilings(device, dtypes) if device.type == "cuda" else cpu_ceilings(dtypes)


def cpu_ceilings(dtypes: Iterable[torch.dtype]) -> tuple[Ceilings | None, str]:
    """Loops in registers, and one that reads a large memory, on torch's threads."""
    loops, why_not = load_loops()
    if loops is None:
        return None, why_not
    bandwidth = loops.large_read_bytes_per_second()
    fp32 = loops.flops_per_second(torch.float32)
    bf16 = loops.flops_per_second(torch.bfloat16) if loops.has_bf16_dot() else fp32
    said = f"measured peaks: fp32 multiply-add {fp32 / 1e9:.0f} GFLOP/s, "
    said += f"bf16 dot product {bf16 / 1e9:.0f} GFLOP/s, " if loops.has_bf16_dot() else "no bf16 dot product, "
    known = {torch.bfloat16: bf16, torch.float64: fp32 / 2}
    rates = {dtype: known.get(dtype, fp32) for dtype in dtypes}  # fp16 is computed in fp32
    return Ceilings(bandwidth, rates, f"{said}read {bandwidth / 1e9:.1f} GB/s of large memory"), ""


def gpu_ceilings(
    device: torch.device, dtypes: Iterable[torch.dtype], *, size: int = 8192
) -> tuple[Ceilings | None, str]:
    """A large copy (bytes read plus bytes written) and a large square product per dtype, on random data."""
    copy_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    bandwidth = 2 * copy_bytes / copy_seconds(copy_bytes, device)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * size**3 / median_event_seconds(lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
    products = ", ".join(
        f"{str(dtype).removeprefix('torch.')} product {rate / 1e12:.0f} TFLOP/s" for dtype, rate in rates.items()
    )
    said = f"measured ceilings: copy {bandwidth / 1e12:.2f} TB/s (read + write), {products}"
    return Ceilings(bandwidth, rates, said), ""


def copy_seconds(size: int, device: torch.device) -> float:
    """Time of one copy of `size` random bytes on the device."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return median_event_seconds(lambda: target.copy_(source))


def median_event_seconds(call: Callable[[], object], repeats: int = 11) -> float:
    """Median time of one call on the current CUDA stream."""
    seconds = []
    for _ in range(3):
        call()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
