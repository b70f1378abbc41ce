"""One of two processes that train MultiHeadAttention together; test_distributed.py starts it and reads what it prints.

It runs outside of the repository, so that it imports the installed package.
"""

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mha_ext import MultiHeadAttention

WORLD, BATCH = 2, 4


def shard(module: nn.Module, *children: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in children:
        fully_shard(module if name == "" else module.get_submodule(name), mesh=mesh)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": lambda module: shard(module, ""),
    "fsdp_of_packed_projection": lambda module: shard(module, "qkv_proj", ""),
    "fsdp_of_every_projection": lambda module: shard(module, "qkv_proj", "out_proj", ""),
}


def inputs(cross: bool, part: slice = slice(None)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 5, 16, generator=generator), torch.randn(BATCH, 3, 16, generator=generator)
    return [x[part], y[part]] if cross else [x[part]]


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(module: nn.Module, examples: list[Tensor]) -> list[Tensor]:
    """Two steps, and the gradients of the last."""
    optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (module(*examples) + 0).square().mean().backward()
        optimizer.step()
    return [whole(x.grad) for x in module.parameters()]


def check(name: str, cross: bool, rank: int) -> None:
    torch.manual_seed(0)
    alone = MultiHeadAttention(16, 4, num_kv_heads=2)
    together = WRAPPERS[name](copy.deepcopy(alone))
    expected = train(alone, inputs(cross))
    share = BATCH // WORLD
    gradients = train(together, inputs(cross, slice(rank * share, (rank + 1) * share)))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for updated, parameter in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(updated.detach()), parameter.detach())


def main() -> None:
    rank, meeting_point = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)
    for name in WRAPPERS:
        for cross in (False, True):
            check(name, cross, rank)
            print(name, cross, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
