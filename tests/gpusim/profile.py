"""Prints what every kernel of the package does at named shapes: the counters that stand in for a profiler.

python -m tests.gpusim.profile            a table
python -m tests.gpusim.profile --json     every counter
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from collections.abc import Callable

from tests.gpusim.build import load_package
from tests.gpusim.simulator import LaunchRecord


def cases() -> dict[str, Callable[[], object]]:
    """Named calls, one or more kernels each. Shapes are multiples of every tile."""
    import torch

    ops = torch.ops.mha_ext
    torch.manual_seed(0)
    found: dict[str, Callable[[], object]] = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        a, p = torch.randn(1, 2, 256, 64, dtype=dtype), torch.rand(1, 2, 256, 256).to(dtype)
        for tf32 in (False, True) if dtype == torch.float32 else (False,):
            kind = "tf32" if tf32 else name
            found[f"scores {kind} 256x256x64"] = lambda a=a, t=tf32: ops.matmul(
                a, a, False, True, 0.125, 2, a.dtype, t, None
            )
            found[f"output {kind} 256x64x256"] = lambda p=p, a=a, t=tf32: ops.matmul(
                p, a, False, False, 1.0, 2, a.dtype, t, None
            )
            found[f"transposed {kind} 256x64x256"] = lambda p=p, a=a, t=tf32: ops.matmul(
                p, a, True, False, 1.0, 2, a.dtype, t, None
            )
        found[f"softmax {name} 256x256"] = lambda p=p: ops.masked_softmax(
            p, None, None, None, None, None, None, 0, -1, -1, 0.0, 0.0, p.dtype, False
        )
        packed = torch.randn(2, 128, (8 + 2 * 2) * 64).to(dtype)
        found[f"qkv_split {name} 128, 8+2x2 heads"] = lambda x=packed: ops.qkv_split(x, None, 8, 2)
    return found


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


def main() -> None:
    """Run every case once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="every counter of every launch")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    simulator = load_package()
    results: list[tuple[str, LaunchRecord]] = []
    for name, run in cases().items():
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
