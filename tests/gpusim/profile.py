"""Prints what every kernel of the package does at named shapes: the counters that stand in for a profiler.

python -m tests.gpusim.profile                                 a table
python -m tests.gpusim.profile --json                          every counter
python -m tests.gpusim.profile --speed                         how fast the simulator is, on one thread
python -m tests.gpusim.profile --only attention --length 512 --head-dim 96 --heads 4      at another shape
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.gpusim.build import load_package
from tests.gpusim.simulator import LaunchRecord, Simulator

Cases = dict[str, Callable[[], object]]


def cases(length: int = 256, head_dim: int = 64) -> Cases:
    """Named calls, one or more kernels each. These shapes are multiples of every tile."""
    import torch

    ops = torch.ops.mha_ext
    torch.manual_seed(0)
    found: Cases = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        a, p = torch.randn(1, 2, length, head_dim, dtype=dtype), torch.rand(1, 2, length, length).to(dtype)
        for tf32 in (False, True) if dtype == torch.float32 else (False,):
            kind = "tf32" if tf32 else name
            found[f"scores {kind} {length}x{length}x{head_dim}"] = lambda a=a, t=tf32: ops.matmul(
                a, a, False, True, 0.125, 2, a.dtype, t, None
            )
            found[f"output {kind} {length}x{head_dim}x{length}"] = lambda p=p, a=a, t=tf32: ops.matmul(
                p, a, False, False, 1.0, 2, a.dtype, t, None
            )
            found[f"transposed {kind} {length}x{head_dim}x{length}"] = lambda p=p, a=a, t=tf32: ops.matmul(
                p, a, True, False, 1.0, 2, a.dtype, t, None
            )
        found[f"softmax {name} {length}x{length}"] = lambda p=p: ops.masked_softmax(
            p, None, None, None, None, None, None, 0, -1, -1, 0.0, 0.0, p.dtype, False
        )
        packed = torch.randn(2, 128, (8 + 2 * 2) * 64).to(dtype)
        found[f"qkv_split {name} 128, 8+2x2 heads"] = lambda x=packed: ops.qkv_split(x, None, 8, 2)
    return found


def attention_cases(length: int = 1024, head_dims: Sequence[int] = (64, 128), heads: int = 2, only: str = "") -> Cases:
    """Fused attention, forward and backward: full, causal, with a boolean mask, and with a bias that has a gradient.

    Only cases whose name contains `only`: to name a backward is to run its forward.
    """
    import torch

    import mha_ext

    found: Cases = {}
    for dtype, head_dim, kind in itertools.product(
        (torch.float16, torch.float32), head_dims, ("full", "causal", "mask", "bias")
    ):
        name = f"{str(dtype).removeprefix('torch.')} {length}x{head_dim} {kind}"
        if not any(only in f"{direction} {name}" for direction in ("attention", "attention backward")):
            continue
        inputs = [torch.randn(1, heads, length, head_dim).to(dtype).requires_grad_() for _ in range(3)]
        mask = torch.rand(1, heads, length, length)
        options: dict[str, Any] = {"is_causal": kind == "causal", "backend": "fused"}
        if kind == "mask":
            options["attn_mask"] = mask < 0.9
        if kind == "bias":
            options["attn_mask"] = mask.to(dtype).requires_grad_()
        wanted = [*inputs, options["attn_mask"]] if kind == "bias" else inputs

        def forward(x: list[torch.Tensor] = inputs, options: dict[str, Any] = options) -> torch.Tensor:
            return mha_ext.attention(*x, **options)

        output, grad = forward(), torch.randn(1, heads, length, head_dim).to(dtype)
        found[f"attention {name}"] = forward
        found[f"attention backward {name}"] = lambda x=wanted, y=output, g=grad: torch.autograd.grad(
            y, x, g, retain_graph=True
        )
    return found


def backward_cases(length: int = 256) -> Cases:
    """The kernels of the backward pass."""
    import torch

    ops = torch.ops.mha_ext
    found: Cases = {}
    for dtype in (torch.float16, torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        p = torch.rand(1, 2, length, length).to(dtype)
        lse = torch.zeros(1, 2, length, dtype=torch.promote_types(dtype, torch.float32))
        found[f"softmax backward {name} {length}x{length}"] = lambda p=p, lse=lse: ops.masked_softmax_backward(
            p, None, None, p, None, lse, None, None, None, 0, 0.0, 0.0, p.dtype, False, False, False
        )
        query, key = torch.randn(2, 8, 128, 64).to(dtype), torch.randn(2, 2, 128, 64).to(dtype)
        found[f"qkv_merge {name} 128, 8+2x2 heads"] = lambda q=query, k=key: ops.qkv_merge(q, k, k, True)
    return found


def tile_case() -> Cases:
    """One block: 4 warps, the smallest launch of the tensor-core kernel."""
    import torch

    a = torch.randn(1, 1, 64, 64, dtype=torch.float16)
    return {
        "one tile float16 64x64x64": lambda: torch.ops.mha_ext.matmul(a, a, False, True, 1.0, 1, a.dtype, False, None)
    }


def readable(names: list[str]) -> list[str]:
    """Mangled names, read by c++filt where there is one, without their arguments."""
    try:
        done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return [line.replace("mha_ext::", "").removeprefix("void ") for line in done.stdout.splitlines()]


def row(r: LaunchRecord) -> list[str]:
    """One line of the table."""
    load = r.global_load_sectors * 32 / max(r.global_load_bytes, 1)
    store = r.global_store_sectors * 32 / max(r.global_store_bytes, 1)
    return [
        f"{r.warp_instructions:,}",
        f"{r.instructions['special_function']:,}",
        f"{r.tensor_flops / 1e6:.2f}",
        f"{r.global_load_bytes + r.tma_bytes:,}",
        f"{r.global_store_bytes:,}",
        f"{load:.2f}" if r.global_load_bytes else "-",
        f"{store:.2f}" if r.global_store_bytes else "-",
        f"{r.wavefronts_per_load:.2f}" if r.shared_load_requests else "-",
        f"{r.wavefronts_per_store:.2f}" if r.shared_store_requests else "-",
        f"{r.barriers:,}",
    ]


def print_speed(simulator: Simulator, only: str, named: Cases) -> None:
    """Warp instructions a second of processor time, the best of several rounds, without and with all checks."""
    modes = {
        "no checks": {"checks": False, "count_memory": False},
        "all checks": {"checks": True, "count_memory": True},
    }
    print(f"{'case':36s}{'instr':>10s}" + "".join(f"{mode:>16s}{'':>10s}" for mode in modes))
    for name, run in {**named, **tile_case()}.items():
        if only not in name:
            continue
        simulator.take_records()
        run()
        instructions = sum(record.warp_instructions for record in simulator.take_records())
        times = max(1, 500_000 // instructions)
        best = dict.fromkeys(modes, float("inf"))
        for _ in range(6):
            for mode, switches in modes.items():  # in turn, so that a busy machine disturbs both
                with simulator.using(threads=1, **switches):
                    begin = time.process_time()
                    for _ in range(times):
                        run()
                    best[mode] = min(best[mode], (time.process_time() - begin) / times)
            simulator.take_records()
        cells = "".join(f"{instructions / t / 1e6:11.1f} M/s{1e3 * t:9.3f}ms" for t in best.values())
        print(f"{name:36s}{instructions:10,d}{cells}", flush=True)


def main() -> None:
    """Run every case once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="every counter of every launch")
    parser.add_argument("--speed", action="store_true", help="time the simulator itself")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--length", type=int, help="of the sequences (256; attention: 1024, with --speed 256)")
    parser.add_argument("--head-dim", type=int, help="width of a head (64; attention: 64 and 128)")
    parser.add_argument("--heads", type=int, default=2, help="of attention (2)")
    arguments = parser.parse_args()
    simulator = load_package()
    named = {
        **cases(arguments.length or 256, arguments.head_dim or 64),
        **backward_cases(arguments.length or 256),
        **attention_cases(
            arguments.length or (256 if arguments.speed else 1024),
            (arguments.head_dim,) if arguments.head_dim else (64, 128),
            arguments.heads,
            arguments.only,
        ),
    }
    if arguments.speed:
        print_speed(simulator, arguments.only, named)
        return
    results: list[tuple[str, LaunchRecord]] = []
    for name, run in named.items():
        if arguments.only in name:
            simulator.take_records()
            run()
            results += [(name, record) for record in simulator.take_records()]
    if arguments.json:
        everything = [{"case": name, **dataclasses.asdict(record)} for name, record in results]
        print(json.dumps(everything, indent=1))
        return
    head = ["instr", "MUFU", "tensor MFLOP", "bytes read", "bytes written"]
    head += ["sectors/load", "sectors/store", "waves/load", "waves/store", "barriers"]
    print(f"{'case':34s}" + "".join(f"{h:>15s}" for h in head) + "  kernel")
    for (name, record), kernel in zip(results, readable([r.kernel for _, r in results]), strict=True):
        print(f"{name:34s}" + "".join(f"{cell:>15s}" for cell in row(record)) + f"  {kernel[:60]}")


if __name__ == "__main__":
    main()
