"""Calls the kernels of a build with tensors, in a process of its own that a fault may end."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.cpu_kernels.build import Build

DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.bool: 4}  # DType of csrc/params.h
SECONDS_A_CALL = 60
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "max_malloc_fill_size=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class KernelError(RuntimeError):
    """The process died: a sanitizer's report, a read of memory that is not there, an emulator's complaint."""


class Result(NamedTuple):
    """What attention_forward returns, and all bytes that the output lies in."""

    output: Tensor
    lse: Tensor
    row_stats: Tensor
    max_score: Tensor
    entropy: Tensor
    output_memory: Tensor


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from a tensor's first to behind its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous(shape: Sequence[int]) -> list[int]:
    """Its strides."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def memory_of(tensor: Tensor) -> bytes:
    """All that lies between a tensor's first element and its last."""
    flat = torch.as_strided(tensor, (extent(tensor.shape, tensor.stride()),), (1,))
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


class Call:
    """The text of a call: see driver.cpp."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.outputs: list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []

    def number(self, name: str, value: float | int | bool) -> None:
        self.parts.append(f"number {name} {int(value) if isinstance(value, bool) else value!r}\n".encode())

    def strides(self, name: str, strides: Sequence[int], packed: bool = False) -> None:
        for axis, stride in zip(("batch", "head", "row", "col"), strides, strict=True):
            self.number(f"{name}.{axis}", 0 if packed and axis == "batch" else stride)

    def input(self, name: str, tensor: Tensor) -> None:
        data = memory_of(tensor)
        self.parts += [f"input {name} {len(data)}\n".encode(), data]

    def output(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None,
        packed: bool = False,
    ) -> None:  # fmt: skip
        strides = contiguous(shape) if strides is None else strides
        if len(strides) == 4:
            self.strides(name, strides, packed)
        length = extent(shape, strides) * dtype.itemsize
        self.parts.append(f"output {name} {length}\n".encode())
        self.outputs.append((name, dtype, tuple(shape), tuple(strides), length))


class Kernels:
    """The kernels of one build."""

    def __init__(self, build: Build, executable: Path) -> None:
        self.build = build
        self._command = [*(["qemu-aarch64"] if build.emulated else []), str(executable)]
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: Any = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=os.environ | SANITIZER_OPTIONS,
        )  # fmt: skip
        return self._process

    def close(self) -> None:
        """End the process; what a sanitizer finds at the end, a leak, is a fault as well."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS_A_CALL)
        if self._process.returncode != 0:
            raise self._fault("at the end")
        self._forget()

    def _forget(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None

    def _fault(self, when: str) -> KernelError:
        assert self._process is not None
        code = self._process.wait(SECONDS_A_CALL)
        self._stderr.seek(0)
        report = self._stderr.read().decode(errors="replace")
        self._forget()
        return KernelError(f"{self.build.name}, {when}: ended with {code}\n{report[:4000]}")

    def run(self, call: Call, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Each output, and its whole memory."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(SECONDS_A_CALL, process.kill)
        alarm.start()
        results = {}
        try:
            process.stdin.write(b"".join([*call.parts, f"{kind}\n".encode()]))
            process.stdin.flush()
            if process.stdout.readline() != b"done\n":
                raise self._fault("in a call")
            for name, dtype, shape, strides, length in call.outputs:
                data = bytearray(process.stdout.read(length))
                if len(data) != length:
                    raise self._fault("in an answer")
                memory = torch.frombuffer(data, dtype=torch.uint8) if length else torch.empty(0, dtype=torch.uint8)
                results[name] = memory.view(dtype).as_strided(shape, strides), memory
        except BrokenPipeError as error:
            raise self._fault("before a call was read") from error
        finally:
            alarm.cancel()
        return results

    def attention(
        self, inputs: dict[str, Any], *, output_strides: Sequence[int] | None = None, splits: int = 1, threads: int = 2,
        statistics: bool = True,
    ) -> Result:  # fmt: skip
        """`mha_ext.attention` by the kernels alone.

        Beside its arguments: rng_state with dropout_p, and cu_seqlens (of queries, of keys) with tensors of batch 1.
        """
        query, value = inputs["query"], inputs["value"]
        shape, rows = (*query.shape[:3], value.shape[3]), query.shape[:3]
        call = start_call(inputs, threads)
        call.number("splits", splits)
        call.output("output", query.dtype, shape, output_strides, "cu_seqlens" in inputs)
        call.output("lse", torch.float32, rows)
        call.output("row_stats", torch.float32, (*rows, 2))
        if statistics:
            call.output("max_score", torch.float32, rows)
            call.output("entropy", torch.float32, rows)
        results = self.run(call, "forward")
        nothing = torch.empty(0)
        found = {name: tensor for name, (tensor, _) in results.items()}
        return Result(
            found["output"], found["lse"], found["row_stats"], found.get("max_score", nothing),
            found.get("entropy", nothing), results["output"][1],
        )  # fmt: skip

    def gradients(
        self, inputs: dict[str, Any], grad_output: Tensor, grad_lse: Tensor | None = None, *, threads: int = 2
    ) -> dict[str, Tensor]:
        """Of query, key, value, a float attn_mask, alibi_slopes and sinks: the forward, and the backward after it."""
        forward = self.attention(inputs, threads=threads, statistics=False)
        call = start_call(inputs, threads)
        call.input("output", forward.output)
        call.strides("output", forward.output.stride(), packed="cu_seqlens" in inputs)
        call.input("row_stats", forward.row_stats)
        call.input("grad_output", grad_output)
        call.strides("grad_output", grad_output.stride(), packed="cu_seqlens" in inputs)
        if grad_lse is not None:
            call.input("grad_lse", grad_lse)
        for name in ("query", "key", "value"):
            tensor = inputs[name]
            call.output(f"grad_{name}", tensor.dtype, tensor.shape, packed="cu_seqlens" in inputs)
        batch, heads, seqlen_q = inputs["query"].shape[:3]
        mask, slopes, sinks = (inputs.get(name) for name in ("attn_mask", "alibi_slopes", "sinks"))
        if mask is not None and mask.is_floating_point():
            bias = (*with_four_axes(mask).shape[:3], inputs["key"].shape[2])
            call.output("grad_bias", torch.float32, bias)
            for axis, size in zip(("batch", "head", "row"), bias, strict=False):
                call.number(f"bias.{axis}", size)
        if slopes is not None:
            call.output("grad_slopes", torch.float32, (batch, heads))
        if sinks is not None:
            rows = (batch, heads, seqlen_q)
            call.output("grad_sink_rows", torch.float32, rows)
        found = {name.removeprefix("grad_"): tensor for name, (tensor, _) in self.run(call, "backward").items()}
        if "bias" in found:
            found["attn_mask"] = found.pop("bias").sum_to_size(with_four_axes(mask).shape).reshape(mask.shape)
        if "slopes" in found:
            found["alibi_slopes"] = found.pop("slopes").sum_to_size(slopes.shape)
        if "sink_rows" in found:
            found["sinks"] = found.pop("sink_rows").sum((0, 2))
        return found


def with_four_axes(mask: Tensor) -> Tensor:
    """As the kernels read it."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def start_call(inputs: dict[str, Any], threads: int) -> Call:
    """All that forward and backward read, in the terms of csrc/params.h."""
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    (batch, heads, seqlen_q, head_dim), seqlen_kv = query.shape, key.shape[2]
    cu_seqlens = inputs.get("cu_seqlens")
    call = Call()
    for name in ("query", "key", "value"):
        assert inputs[name].stride(3) == 1
        call.input(name, inputs[name])
        call.strides(name, inputs[name].stride(), packed=cu_seqlens is not None)
    rows = contiguous(query.shape[:3])
    call.number("rows.batch", rows[0] if cu_seqlens is None else 0)
    call.number("rows.head", rows[1])
    if cu_seqlens is not None:
        batch = cu_seqlens[0].numel() - 1
        call.input("cu_seqlens_q", cu_seqlens[0])
        call.input("cu_seqlens_k", cu_seqlens[1])
    scale = inputs.get("scale")
    for name, number in (
        ("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv), ("num_heads_q", heads),
        ("num_heads_kv", key.shape[1]), ("head_dim", head_dim), ("head_dim_v", value.shape[3]),
        ("scale", 1 / math.sqrt(head_dim) if scale is None else scale), ("dtype", DTYPE_NUMBERS[query.dtype]),
        ("softcap", inputs.get("softcap", 0.0)), ("threads", threads),
    ):  # fmt: skip
        call.number(name, number)

    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = with_four_axes(mask)
        call.input("attn_mask", mask)
        call.strides(
            "attn_mask", [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]
        )
        call.number("attn_mask.dtype", DTYPE_NUMBERS[mask.dtype])
    left, right = inputs.get("window", (None, None))
    if inputs.get("is_causal"):
        right = 0 if right is None else min(right, 0)
    call.number("window_left", -1 if left is None else left)
    call.number("window_right", -1 if right is None else right)
    q_offset = inputs.get("q_offset", 0)
    if isinstance(q_offset, str):
        q_offset = seqlen_kv - seqlen_q if cu_seqlens is None else cu_seqlens[1].diff() - cu_seqlens[0].diff()
    if isinstance(q_offset, Tensor):
        call.input("q_offsets", q_offset.long())
    call.number("q_offset", 0 if isinstance(q_offset, Tensor) else q_offset)
    if "key_lengths" in inputs:
        call.input("key_lengths", inputs["key_lengths"].long())
    slopes = inputs.get("alibi_slopes")
    if slopes is not None:
        call.input("alibi_slopes", slopes)
        call.number("alibi_slopes.batch", slopes.stride(0) if slopes.ndim == 2 else 0)
        call.number("alibi_slopes.head", slopes.stride(-1))
    if "sinks" in inputs:
        call.input("sinks", inputs["sinks"])
    if "rng_state" in inputs:
        dropout_p = inputs["dropout_p"]
        call.input("rng_state", inputs["rng_state"])
        call.number("threshold", min(math.floor(dropout_p * 2**32), 2**32 - 1))
        call.number("drop_all", dropout_p == 1)
        call.number("keep_scale", 1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    return call
