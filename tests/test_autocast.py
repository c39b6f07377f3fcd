"""autocast: query, key and value are cast, biases never go down, the backward stays outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference

ops: Any = torch.ops.attention_ext


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 4, 9, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_query_key_and_value_are_cast(dtype: torch.dtype) -> None:
    query, key, value = _inputs()
    with torch.autocast("cpu", dtype=dtype):
        output, logsumexp, residual, _ = ops.attention(query, key, value, is_causal=True)
    assert (output.dtype, logsumexp.dtype, residual.dtype) == (dtype, torch.float32, torch.float32)
    halves = [x.to(dtype) for x in (query, key, value)]
    torch.testing.assert_close(output, ops.attention(*halves, is_causal=True)[0])
    output.float().square().sum().backward()
    for x in (query, key, value):
        assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.any()


def test_mixed_inputs_are_brought_together() -> None:
    query, key, value = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ops.attention(query, key.to(torch.bfloat16), value.half())[0]
    assert output.dtype == torch.bfloat16


def test_float32_bias_keeps_finfo_min() -> None:
    query, key, value = _inputs()
    bias = torch.zeros(9, 9)
    bias[2] = torch.finfo(torch.float32).min
    bias.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ops.attention(query, key, value, attn_bias=bias)[0]
    mean = value.to(torch.bfloat16).float().mean(2)
    torch.testing.assert_close(output[:, :, 2].float(), mean, atol=0.02, rtol=0.02)
    output.float().square().sum().backward()
    assert bias.grad is not None and bias.grad.dtype == torch.float32


def test_half_precision_bias_of_the_other_kind_goes_up() -> None:
    query, key, value = _inputs()
    bias = torch.randn(9, 9).half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = ops.attention(query, key, value, attn_bias=bias)[0]
    halves = [x.to(torch.bfloat16) for x in (query, key, value)]
    torch.testing.assert_close(ours, ops.attention(*halves, attn_bias=bias.float())[0])


def test_float64_is_left_alone() -> None:
    query, key, value = _inputs(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ops.attention(query, key, value)[0]
    assert output.dtype == torch.float64


def test_nested_disabled_autocast_is_respected() -> None:
    query, key, value = _inputs()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autocast("cpu", enabled=False),
    ):
        output = ops.attention(query, key, value)[0]
    assert output.dtype == torch.float32


def test_backward_inside_autocast_equals_backward_outside() -> None:
    query, key, value = _inputs()
    gradients = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, logsumexp, _, _ = ops.attention(query, key, value, window_left=3)
            loss = output.float().square().sum() + logsumexp.sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            gradients.append(torch.autograd.grad(loss, (query, key, value)))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_second_derivatives_under_autocast_are_not_rounded_down() -> None:
    query, key, value = _inputs(torch.float64)

    def second() -> Tensor:
        output = ops.attention(query, key, value)[0]
        (first,) = torch.autograd.grad((output**3).sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    expected = second()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = second()
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("average_heads", [False, True])
def test_weights_are_cast_like_the_output(average_heads: bool) -> None:
    query, key, value = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, weights = ae.attention(
            query, key, value, return_weights="mean" if average_heads else True
        )
    assert weights.dtype == torch.bfloat16
    expected = reference.attention(
        query.to(torch.bfloat16).float(),
        key.to(torch.bfloat16).float(),
        value,
        return_weights="mean" if average_heads else True,
    )[1]
    torch.testing.assert_close(weights.float(), expected, atol=4e-3, rtol=1e-2)
    weights.float().square().sum().backward()
    assert query.grad is not None and query.grad.any()


def test_autocast_inside_compile() -> None:
    query, key, value = _inputs()

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = ops.attention(query, key, value)[0]
        return output

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, expected = compiled(query, key, value), step(query, key, value)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected)
