"""Loads, stores and cp.async."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.machine import Machine

N = 128


def noise(shape: int | tuple[int, ...], dtype: type | str) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng(61).bytes(size), dtype).reshape(shape).copy()


def copy(name: str, kernel: str, width: int, count: int) -> None:
    """The registers of one thread are stored in the opposite order."""

    @form(name, "memory")
    def check(machine: Machine) -> None:
        given = noise((N, count), f"u{width // 8}")
        got = np.zeros_like(given)
        machine.launch("memory", kernel, N // 64, 64, given, got)
        same_bits(got, given[:, ::-1])


for _width in (16, 32, 64):
    copy(f"ld.global.b{_width} st.global.b{_width}", f"copy_b{_width}", _width, 1)
    copy(f"ld.global.v2.b{_width} st.global.v2.b{_width}", f"copy_v2_b{_width}", _width, 2)
for _width in (16, 32):
    copy(f"ld.global.v4.b{_width} st.global.v4.b{_width}", f"copy_v4_b{_width}", _width, 4)
copy("ld.v4.u32 st.v4.u32, generic", "copy_generic_v4_b32", 32, 4)
copy("ld.global.nc.v4.b32 st.global.cs.v4.b32", "copy_nc_v4_b32", 32, 4)
copy("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 st.global.wt.v4.b32", "copy_hints_v4_b32", 32, 4)
copy("ld.volatile.global.b32 st.volatile.global.b32", "copy_volatile_b32", 32, 1)
copy("ld.relaxed.gpu.global.b32 st.relaxed.gpu.global.b32", "copy_relaxed_b32", 32, 1)
copy("ld.acquire.gpu.global.b32 st.release.gpu.global.b32", "copy_acquire_b32", 32, 1)


def extend(kind: str) -> None:
    @form(f"ld.global.{kind} into 32 bits", "memory")
    def check(machine: Machine) -> None:
        given = noise(N, f"u{int(kind[1:]) // 8}")
        got = np.zeros(N, np.uint32)
        machine.launch("memory", f"load_{kind}", N // 64, 64, given, got)
        want = given.view(given.dtype.str.replace("u", "i")).astype(np.int32) if kind[0] == "s" else given
        same_bits(got, want.astype(np.uint32))


for _kind in ("s8", "u8", "s16", "u16"):
    extend(_kind)


@form("st.global.u8 of a 32-bit register", "memory")
def check_store_byte(machine: Machine) -> None:
    given, got = noise(N, np.uint32), np.zeros(N, np.uint8)
    machine.launch("memory", "store_u8", N // 64, 64, given, got)
    same_bits(got, given.astype(np.uint8))


def through_shared(name: str, kernel: str, width: int, count: int) -> None:
    @form(name, "memory")
    def check(machine: Machine) -> None:
        given = noise((N // 64, 64, count), f"u{width // 8}")
        got = np.zeros_like(given)
        machine.launch("memory", kernel, N // 64, 64, given, got)
        same_bits(got, given[:, ::-1])


through_shared("st.shared.v4.b32 ld.shared.v4.b32", "shared_v4_b32", 32, 4)
through_shared("st.shared.v2.b64 ld.shared.v2.b64", "shared_v2_b64", 64, 2)
through_shared("cp.async.cg.shared.global 16, wait_all", "cp_async_plain", 32, 4)


@form("st.local ld.local", "memory")
def check_local(machine: Machine) -> None:
    given, got = noise((N, 8), np.uint32), np.zeros((N, 8), np.uint32)
    order = np.array([3, 7, 0, 5, 1, 2, 6, 4], np.uint32)
    machine.launch("memory", "local_b32", N // 64, 64, given, order, got)
    want = np.zeros_like(given)
    want[:, order] = given
    same_bits(got, want)


def zero_filled(name: str, kernel: str, size: int) -> None:
    @form(name, "memory")
    def check(machine: Machine) -> None:
        given = noise((N // 64, 64, size), np.uint8)
        sizes = rng(62).integers(0, size + 1, (N // 64, 64)).astype(np.uint32)
        got = np.zeros_like(given)
        machine.launch("memory", kernel, N // 64, 64, given, sizes, got)
        same_bits(got, np.where(np.arange(size) < sizes[..., None], given, 0)[:, ::-1])


for _size in (4, 8, 16):
    zero_filled(f"cp.async.ca.shared.global {_size}, source size", f"cp_async_ca_{_size}", _size)
zero_filled("cp.async.cg.shared.global 16, source size", "cp_async_cg_16", 16)
zero_filled("cp.async.cg.shared.global.L2::128B 16, source size", "cp_async_cg_hint_16", 16)


@form("cp.async.cg.shared.global 16, source ignored", "memory")
def check_ignored(machine: Machine) -> None:
    given = noise((N // 64, 64, 4), np.uint32)
    ignore = rng(63).integers(0, 2, (N // 64, 64)).astype(np.uint32)
    got = np.zeros_like(given)
    machine.launch("memory", "cp_async_ignore", N // 64, 64, given, ignore, got)
    same_bits(got, np.where(ignore[..., None] != 0, 0, given)[:, ::-1])


def waits(pending: int) -> None:
    @form(f"cp.async.wait_group {pending}", "memory")
    def check(machine: Machine) -> None:
        given, got = noise((4, 32, 4), np.uint32), np.zeros((4, 32, 4), np.uint32)
        machine.launch("memory", f"wait_group_{pending}", 1, 32, given, got)
        want = given.copy()
        want[4 - pending :] = 0
        same_bits(got, want)


for _pending in (0, 1, 3):
    waits(_pending)
