"""Calls the kernels of a build with tensors, in a process of its own that a fault may end."""

from __future__ import annotations

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


class KernelFault(RuntimeError):
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

    def strides(self, name: str, values: Sequence[int], axes: str = "batch head row col") -> None:
        for axis, value in zip(axes.split(), values, strict=False):
            self.number(f"{name}.{axis}", value)

    def input(self, name: str, tensor: Tensor) -> None:
        data = memory_of(tensor)
        self.parts += [f"input {name} {len(data)}\n".encode(), data]

    def output(self, name: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> None:
        length = extent(shape, strides) * dtype.itemsize
        self.parts.append(f"output {name} {length}\n".encode())
        self.outputs.append((name, dtype, tuple(shape), tuple(strides), length))


def contiguous(shape: Sequence[int]) -> list[int]:
    """Its strides."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


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
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._process = None

    def _fault(self, when: str) -> KernelFault:
        assert self._process is not None
        code = self._process.wait(SECONDS_A_CALL)
        self._stderr.seek(0)
        report = self._stderr.read().decode(errors="replace")
        self._forget()
        return KernelFault(f"{self.build.name}, {when}: ended with {code}\n{report[:4000]}")

    def run(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        """Each output, and its whole memory."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(SECONDS_A_CALL, process.kill)
        alarm.start()
        results = {}
        try:
            process.stdin.write(b"".join([*call.parts, b"run\n"]))
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
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, window: tuple[int | None, int | None] = (None, None),
        q_offset: Any = 0, key_lengths: Tensor | None = None, alibi_slopes: Tensor | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, rng_state: Tensor | None = None,
        cu_seqlens: tuple[Tensor, Tensor] | None = None, output_strides: Sequence[int] | None = None,
        splits: int = 1, threads: int = 2, statistics: bool = True,
    ) -> Result:  # fmt: skip
        """`mha_ext.attention` by the kernels alone; packed with cu_seqlens, where tensors have a batch of 1."""
        batch, heads, seqlen_q, head_dim = query.shape
        heads_kv, seqlen_kv, head_dim_v = key.shape[1], key.shape[2], value.shape[3]
        call = Call()
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            assert tensor.stride(3) == 1
            call.input(name, tensor)
            call.strides(name, tensor.stride()[:3] if cu_seqlens is None else (0, *tensor.stride()[1:3]))
        out_shape, rows = (batch, heads, seqlen_q, head_dim_v), (batch, heads, seqlen_q)
        out_strides = contiguous(out_shape) if output_strides is None else output_strides
        call.output("output", query.dtype, out_shape, out_strides)
        call.strides("output", out_strides[:3] if cu_seqlens is None else (0, *out_strides[1:3]))
        call.output("lse", torch.float32, rows, contiguous(rows))
        call.output("row_stats", torch.float32, (*rows, 2), contiguous((*rows, 2)))
        if statistics:
            call.output("max_score", torch.float32, rows, contiguous(rows))
            call.output("entropy", torch.float32, rows, contiguous(rows))
        call.strides("rows", contiguous(rows)[:2] if cu_seqlens is None else (0, seqlen_q))
        items = batch
        if cu_seqlens is not None:
            items = cu_seqlens[0].numel() - 1
            call.input("cu_seqlens_q", cu_seqlens[0])
            call.input("cu_seqlens_k", cu_seqlens[1])
        for name, number in (
            ("batch", items), ("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv), ("num_heads_q", heads),
            ("num_heads_kv", heads_kv), ("head_dim", head_dim), ("head_dim_v", head_dim_v),
            ("scale", 1 / math.sqrt(head_dim) if scale is None else scale), ("dtype", DTYPE_NUMBERS[query.dtype]),
            ("softcap", softcap or 0.0), ("splits", splits), ("threads", threads),
        ):  # fmt: skip
            call.number(name, number)

        if attn_mask is not None:
            mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
            strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
            call.input("attn_mask", mask)
            call.strides("attn_mask", strides)
            call.number("attn_mask.dtype", DTYPE_NUMBERS[mask.dtype])
        left, right = window
        if is_causal:
            right = 0 if right is None else min(right, 0)
        call.number("window_left", -1 if left is None else left)
        call.number("window_right", -1 if right is None else right)
        if isinstance(q_offset, str):
            q_offset = seqlen_kv - seqlen_q if cu_seqlens is None else cu_seqlens[1].diff() - cu_seqlens[0].diff()
        if isinstance(q_offset, Tensor):
            call.input("q_offsets", q_offset.long())
        call.number("q_offset", 0 if isinstance(q_offset, Tensor) else q_offset)
        if key_lengths is not None:
            call.input("key_lengths", key_lengths.long())
        if alibi_slopes is not None:
            call.input("alibi_slopes", alibi_slopes)
            call.strides("alibi_slopes", (0, *alibi_slopes.stride())[-2:])
        if sinks is not None:
            call.input("sinks", sinks)
        if rng_state is not None:
            call.input("rng_state", rng_state)
            call.number("threshold", min(math.floor(dropout_p * 2**32), 2**32 - 1))
            call.number("drop_all", dropout_p == 1)
            call.number("keep_scale", 1 / (1 - dropout_p) if dropout_p < 1 else 0.0)

        results = self.run(call)
        nothing = torch.empty(0)
        found = {name: tensor for name, (tensor, _) in results.items()}
        return Result(
            found["output"], found["lse"], found["row_stats"], found.get("max_score", nothing),
            found.get("entropy", nothing), results["output"][1],
        )  # fmt: skip
