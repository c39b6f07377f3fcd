"""DTensor inputs: the operator on shards of the batch and of the heads, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import attention_ext as ae
from attention_ext.integrations import dtensor
from sharding_ranks import B, E, L, arguments, cases, check
from tiers import ROOT, run_python
from watch import Watch


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dtensor.register()
    dtensor.register()  # again is harmless
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=str)
@pytest.mark.parametrize(("bias", "options"), cases())
def test_one_rank_gives_the_numbers_of_the_operator(
    mesh: DeviceMesh, bias: str, options: bool, placement: Replicate | Shard
) -> None:
    check(mesh, [placement], arguments(bias, options), B * 8 * L * E)


def test_the_placements_of_results_follow_the_inputs(mesh: DeviceMesh) -> None:
    x = torch.randn(B, 4, L, E)
    for placement in (Replicate(), Shard(0), Shard(1)):
        made = distribute_tensor(x, mesh, [placement]).requires_grad_()
        out = ae.attention(made, made, made, is_causal=True)
        assert isinstance(out, DTensor) and out.placements == (placement,)
        (gradient,) = torch.autograd.grad(out.sum(), made)
        assert gradient.placements == (placement,)


def test_torchs_function_takes_distributed_tensors_inside_the_context(mesh: DeviceMesh) -> None:
    x = torch.randn(B, 4, L, E)
    made = distribute_tensor(x, mesh, [Shard(1)])
    with ae.sdpa(), Watch() as seen:
        out = F.scaled_dot_product_attention(made, made, made, is_causal=True)
    assert seen.ours == 1
    right = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(out.full_tensor(), right)


@pytest.mark.slow
def test_four_ranks_give_the_numbers_of_one() -> None:
    path = ROOT / "tests" / "sharding_ranks.py"
    run_python(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
