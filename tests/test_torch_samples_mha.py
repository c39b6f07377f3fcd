"""PyTorch's own sample inputs for nn.MultiheadAttention, run through ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

from attention_ext import MultiheadAttention
from watch import Watch

INFO: ModuleInfo = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)


def samples(dtype: torch.dtype, training: bool) -> list[Any]:
    return list(
        INFO.module_inputs_func(
            INFO, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
    )


def test_there_are_as_many_samples_as_known() -> None:
    # 5 flags of two values each, for both layouts: an empty list would test nothing.
    assert len(samples(torch.float32, True)) >= 64


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_equal_torchs(dtype: torch.dtype, training: bool) -> None:
    for sample in samples(dtype, training):
        made = sample.constructor_input
        theirs = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        ours = MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        ours.load_state_dict(theirs.state_dict())
        call = sample.forward_input
        results = []
        for module in (theirs, ours):
            out, weights = module(*call.args, **call.kwargs)
            loss = out.square().sum() + weights.square().sum()
            grads = torch.autograd.grad(loss, list(module.parameters()))
            results.append((out, weights, torch.cat([grad.flatten() for grad in grads])))
        for mine, right in zip(*reversed(results), strict=True):
            # Inputs reach 9, so that gradients are small differences of large numbers.
            scale = right.abs().max().item()
            allowed = (1e-12 if dtype == torch.float64 else 1e-5) * max(scale, 1.0)
            torch.testing.assert_close(mine, right, rtol=0, atol=allowed)
        with Watch() as seen:
            ours(*call.args, **call.kwargs)
        assert (seen.ours, seen.other_ways) == (1, [])


@pytest.mark.parametrize("training", [True, False])
def test_unbatched_results_equal_pytorchs_reference_function(training: bool) -> None:
    for sample in samples(torch.float64, training):
        made, call = sample.constructor_input, sample.forward_input
        module = MultiheadAttention(*made.args, **made.kwargs, dtype=torch.float64)
        module.train(training)
        out = module(*call.args, **call.kwargs)
        expected = sample.reference_fn(module, *call.args, **call.kwargs)
        torch.testing.assert_close(out, expected)
