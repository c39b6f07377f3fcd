"""DTensor cases for one rank or several, used by test_sharding.py; the several are forked here.

Every rank knows the whole tensors, and compares what the sharded call gives with what the plain
operator makes of them.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attention_ext.integrations import dtensor
from watch import Watch

OPS: Any = torch.ops.attention_ext
NAMES = [argument.name for argument in OPS.attention.default._schema.arguments[:12]]
LEARNED = ("query", "key", "value", "attn_bias", "sinks")
B, L, S, E = 4, 5, 7, 6

BIASES: dict[str, tuple[int, ...] | None] = {
    "no bias": None,
    "bias (L, S)": (L, S),
    "bias (1, H, L, S)": (1, 8, L, S),
    "bias (B, 1, L, S)": (B, 1, L, S),
    "bias (B, H, L, S)": (B, 8, L, S),
}


def arguments(bias: str, options: bool, heads: int = 8, kv_heads: int = 4) -> dict[str, Tensor]:
    """Equal on every rank."""
    torch.manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    tensors = {
        "query": numbers(B, heads, L, E),
        "key": numbers(B, kv_heads, S, E),
        "value": numbers(B, kv_heads, S, E),
    }
    shape = BIASES[bias]
    if shape is not None:
        tensors["attn_bias"] = numbers(*(heads if n == 8 else n for n in shape))
    if options:
        tensors["attn_mask"] = torch.rand(B, 1, L, S) > 0.2
        tensors["key_mask"] = torch.rand(B, S) > 0.1
        tensors["sinks"] = numbers(heads)
        tensors["alibi_slopes"] = torch.rand(heads, dtype=torch.float64)
        tensors["query_offsets"] = torch.randint(0, 3, (B,))
    return tensors


def results(tensors: dict[str, Tensor], **scalars: Any) -> list[Tensor]:
    """Output, logsumexp, and the gradients of all that can have one."""
    leaves = [x.requires_grad_() for name, x in tensors.items() if name in LEARNED]
    output, logsumexp, *_ = OPS.attention(*(tensors.get(name) for name in NAMES), **scalars)
    loss = output.sin().sum() + logsumexp.sin().sum()
    return [output, logsumexp, *torch.autograd.grad(loss, leaves)]


def distributed(
    tensors: dict[str, Tensor], mesh: DeviceMesh, placements: list[Any]
) -> dict[str, Tensor]:
    """The tensors as DTensors: query, key and value so placed, the others whole on every rank."""
    made = {}
    for name, x in tensors.items():
        here = placements if name in ("query", "key", "value") else [Replicate()] * mesh.ndim
        made[name] = distribute_tensor(x.detach().clone(), mesh, here)
    return made


def check(mesh: DeviceMesh, placements: list[Any], tensors: dict[str, Tensor], local: int) -> None:
    """The numbers of the whole, from calls on `local` query elements a rank."""
    expected = results(tensors)
    with Watch() as seen:
        made = results(distributed(tensors, mesh, placements))
    assert seen.ours == 1 and seen.calls["attention_ext::attention_backward"] == 1
    output = made[0]
    assert isinstance(output, DTensor)
    assert output.to_local().numel() == local, (output.placements, output.to_local().shape)
    for ours, right in zip(made, expected, strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), right)


def cases() -> Iterator[tuple[str, bool]]:
    return itertools.product(BIASES, (False, True))


def work() -> None:
    """What each of four ranks does."""
    whole = B * 8 * L * E
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for bias, options in cases():
        for mesh, placements in (
            (line, [Shard(0)]),
            (line, [Shard(1)]),
            (square, [Shard(0), Shard(1)]),
            (square, [Shard(1), Shard(0)]),
            (square, [Shard(1), Shard(1)]),
            (square, [Replicate(), Shard(1)]),
        ):
            shards = 2 if placements[0] == Replicate() else 4
            check(mesh, placements, arguments(bias, options), whole // shards)
    # Two key/value heads do not fall into four groups: the heads are gathered, the batch stays.
    few = arguments("no bias", False, heads=4, kv_heads=2)
    check(line, [Shard(1)], few, B * 4 * L * E)
    check(square, [Shard(0), Shard(1)], few, B * 4 * L * E // 2)
    # Six of them would be cut 2, 2, 2, 0 while twelve query heads are cut 3, 3, 3, 3.
    check(line, [Shard(1)], arguments("no bias", False, heads=12, kv_heads=6), B * 12 * L * E)
    # Dropout is by the place in the whole: equal to the undistributed call, so it is gathered.
    tensors = arguments("no bias", False)
    tensors["rng_state"] = torch.tensor([1, 2, 0, 0, 0, 0])
    expected = results(tensors, dropout_p=0.5)
    made = results(distributed(tensors, line, [Shard(0)]), dropout_p=0.5)
    for ours, right in zip(made, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), right)


def main() -> None:
    dtensor.register()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(4):
            child = os.fork()
            if child == 0:
                store = dist.FileStore(f"{folder}/store", 4)
                dist.init_process_group("gloo", rank=rank, world_size=4, store=store)
                try:
                    work()
                    dist.barrier()
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(0 if statuses == [0] * 4 else 1)


if __name__ == "__main__":
    main()
