"""Bulk copies and bulk reductions of contiguous bytes."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.families.atomic import operands, scalar
from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.machine import Machine


def plain(name: str, kernel: str) -> None:
    @form(name, "bulk_sm90")
    def check(machine: Machine) -> None:
        for size in (16, 48, 1024, 4096):
            given = np.frombuffer(rng(size).bytes(size), np.uint8).copy()
            got = np.zeros(size + 32, np.uint8)
            machine.launch("bulk_sm90", kernel, 1, 64, given, got, np.uint32(size), shared=size + 1024)
            same_bits(got[:size], given)
            assert not got[size:].any()


plain("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "bulk_load")
plain("cp.async.bulk.global.shared::cta.bulk_group, wait_group", "bulk_store")
plain("cp.async.bulk.global.shared::cta.bulk_group, wait_group.read", "bulk_store_read")


def reduction(name: str) -> None:
    dtype, layout, combine = scalar(name)

    @form(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{name}", "bulk_sm90")
    def check(machine: Machine) -> None:
        memory, a = operands(dtype, layout)
        want = combine(memory, a)
        machine.launch(
            "bulk_sm90",
            f"bulk_{name.replace('.', '_')}",
            1,
            64,
            a.view(np.uint8),
            memory.view(np.uint8),
            np.uint32(a.nbytes),
            shared=a.nbytes + 1024,
        )
        same_bits(memory, want)


for _name in ("add.f32", "add.f64", "add.noftz.f16", "add.noftz.bf16", "add.u32", "add.u64"):
    reduction(_name)
for _name in ("min.s32", "max.u32", "and.b32", "xor.b64"):
    reduction(_name)
