"""torch.compile and torch.export of the raw ops and the Python API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attention_ext as ae
from cases import Case, PackedCase, differentiable, params, raw, raw_packed

ops: Any = torch.ops.attention_ext

COMPILED: list[Case | PackedCase] = [
    Case("plain", 5, 7, 8, 6),
    Case("masked", 5, 7, 8, heads=4, kv_heads=2, mask="BHLS", dead_rows=True, layout="heads_last"),
    Case("strided", 5, 7, 8, layout="strided", bias="1HLS", is_causal=True),
    Case("expanded", 5, 7, 8, layout="expanded", bias="B1LS", sinks=True),
    Case("everything", 17, 31, 8, 6, heads=4, kv_heads=2, mask="LS", bias="BHLS", key_mask="bool",
         window=(30, 20), softcap=2.0, sinks=True, alibi="H", dropout_p=0.5, query_offset=1),
    PackedCase("packed", (2, 0, 3), (4, 1, 2), 8, sinks=True, query_offset="per batch"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _leaves_and_step(case: Case | PackedCase) -> tuple[list[Tensor], Callable[..., Any]]:
    """Leaves, and (output, logsumexp) of the raw op as a function of them."""
    args, kwargs = case.make(torch.float32, requires_grad=True)
    leaves = differentiable(args, kwargs)
    arrange = raw_packed if isinstance(case, PackedCase) else raw

    def step(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(leaves, values, strict=True))
        tensors = [named.pop(name) for name in ("query", "key", "value")] + list(args[3:])
        raw_args, raw_kwargs = arrange(tensors, {**kwargs, **named})
        output, logsumexp, _, _ = ops.attention(*raw_args, **raw_kwargs)
        return output, logsumexp

    return list(leaves.values()), step


def _results(step: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    output, logsumexp = step(*leaves)
    loss = output.square().sum() + logsumexp.masked_fill(logsumexp.isinf(), 0.0).sin().sum()
    return [output, logsumexp, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", params(COMPILED))
def test_aot_eager_forward_and_backward(case: Case | PackedCase, dynamic: bool) -> None:
    leaves, step = _leaves_and_step(case)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(_results(compiled, leaves), _results(step, leaves))


@pytest.mark.slow
@pytest.mark.parametrize("case", params(COMPILED[4:5]))
def test_inductor_forward_and_backward(case: Case) -> None:
    leaves, step = _leaves_and_step(case)
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(_results(compiled, leaves), _results(step, leaves))


@pytest.mark.slow
def test_inductor_fuses_around_the_op_whatever_strides_it_has() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        output = ops.attention(query, key + 1, value, is_causal=True)[0]
        return output.transpose(1, 2).flatten(2).relu()

    x = torch.randn(2, 9, 16, requires_grad=True)
    weight = torch.randn(16, 96, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for length in (9, 13):
        cut = x[:, :length] if length <= 9 else torch.randn(2, length, 16, requires_grad=True)
        expected = torch.autograd.grad(block(cut, weight).sum(), (cut, weight))
        ours = torch.autograd.grad(compiled(cut, weight).sum(), (cut, weight))
        torch.testing.assert_close(ours, expected)


def test_many_lengths_compile_at_most_twice() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = ops.attention(x, x, x, attn_mask=mask, is_causal=True)[0]
        return output

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (*range(5, 41, 5), 1):
        x = torch.randn(2, 4, length, 8, requires_grad=True)
        mask = torch.ones(length, length, dtype=torch.bool)
        ours = compiled(x, mask)
        torch.testing.assert_close(ours, step(x, mask))
        ours.sum().backward()
        if length > 1:
            assert counter.frame_count <= 2
    assert counter.frame_count <= 3  # length 1 is one more


def test_marked_dynamic_dimensions_stay_dynamic() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(query: Tensor, key: Tensor) -> Tensor:
        output: Tensor = ops.attention(query, key, key, window_left=7, query_offset=2)[0]
        return output

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for batch, queries, keys in ((2, 5, 7), (3, 9, 4), (4, 33, 70)):
        query, key = torch.randn(batch, 4, queries, 8), torch.randn(batch, 2, keys, 8)
        for dim in (0, 2):
            torch._dynamo.mark_dynamic(query, dim)
            torch._dynamo.mark_dynamic(key, dim)
        torch.testing.assert_close(compiled(query, key), step(query, key))
    assert counter.frame_count == 1


def test_integer_options_do_not_recompile_for_each_value() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    query = torch.randn(1, 2, 3, 8)
    key = torch.randn(1, 2, 40, 8)

    def step(query: Tensor, key: Tensor, offset: int, window: int) -> Tensor:
        output: Tensor = ops.attention(
            query, key, key, query_offset=offset, window_left=window, is_causal=True
        )[0]
        return output

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for n in range(3, 30, 4):
        torch.testing.assert_close(compiled(query, key, n, 2 * n), step(query, key, n, 2 * n))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("case", params(COMPILED[:5:4]))
def test_compiled_autograd(case: Case) -> None:
    leaves, step = _leaves_and_step(case)
    expected = _results(step, leaves)[2:]

    def train(*values: Tensor) -> None:
        output, logsumexp = step(*values)
        (output.square().sum() + logsumexp.sin().sum()).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            for x in leaves:
                x.grad = None
            torch.compile(train, backend="aot_eager")(*leaves)
            torch.testing.assert_close([x.grad for x in leaves], expected)


def test_compiled_autograd_of_an_eager_forward_through_weights() -> None:
    query = torch.randn(1, 2, 5, 8, requires_grad=True)

    def loss() -> Tensor:
        output, logsumexp, residual, _ = ops.attention(query, query, query, window_left=3)
        weights = ops.attention_weights(
            query, query, *(None,) * 9, logsumexp, residual, window_left=3, average_heads=True
        )
        return output.sum() + weights.square().sum()

    (expected,) = torch.autograd.grad(loss(), query)
    enable = torch._dynamo.compiled_autograd._enable
    with enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss().backward()
    assert query.grad is not None
    torch.testing.assert_close(query.grad, expected)


def test_double_backward_in_compiled_autograd() -> None:
    query = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)

    def second(enabled: bool) -> Tensor:
        output = ops.attention(query, query, query, is_causal=True)[0]
        (first,) = torch.autograd.grad(output.pow(3).sum(), query, create_graph=True)
        loss = first.square().sum()
        query.grad = None
        if enabled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        else:
            loss.backward()
        assert query.grad is not None
        return query.grad

    expected = second(False).clone()
    torch.testing.assert_close(second(True), expected)


def test_python_api_compiles_without_graph_breaks() -> None:
    query = torch.randn(2, 4, 9, 8, requires_grad=True)
    mask = torch.rand(9, 9) > 0.3

    def step(query: Tensor) -> tuple[Tensor, ...]:
        results = ae.attention(
            query, query, query, mask, window=(4, 2), return_lse=True, return_weights="mean"
        )
        assert isinstance(results, tuple)
        return results

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(query), step(query), strict=True):
        torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(compiled(query)[2].sin().sum(), query)
    torch.testing.assert_close(ours, torch.autograd.grad(step(query)[2].sin().sum(), query))


def test_compiled_dropout_is_replayed_by_manual_seed() -> None:
    query = torch.randn(2, 4, 9, 8)

    def step(query: Tensor) -> Tensor:
        output = ae.attention(query, query, query, dropout_p=0.5)
        assert isinstance(output, Tensor)
        return output

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(query))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


class Layer(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = ops.attention(query, key, key, key_mask=mask, window_left=4)[0]
        return output


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict: bool) -> None:
    def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        mask = torch.rand(batch, keys) > 0.2
        return torch.randn(batch, 4, queries, 8), torch.randn(batch, 2, keys, 8), mask

    batch, queries, keys = (torch.export.Dim(name, min=2, max=512) for name in ("b", "l", "s"))
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 1: keys})
    exported = torch.export.export(Layer(), inputs(2, 5, 7), dynamic_shapes=shapes, strict=strict)
    other = inputs(3, 11, 9)
    torch.testing.assert_close(exported.module()(*other), Layer()(*other))
    assert "attention_ext.attention.default" in str(exported.graph)


def test_exported_program_survives_saving_and_decomposition(tmp_path: Any) -> None:
    inputs = (torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.ones(2, 7) > 0)
    exported = torch.export.export(Layer(), inputs).run_decompositions()
    torch.export.save(exported, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")
    torch.testing.assert_close(loaded.module()(*inputs), Layer()(*inputs))


def test_fake_tensors_check_shapes_and_say_so() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        query = torch.empty(2, 4, 5, 8)
        output, logsumexp, residual, _ = ops.attention(query, query, query)
        assert output.stride() == (5 * 4 * 8, 8, 4 * 8, 1)
        assert logsumexp.shape == residual.shape == (2, 4, 5)
        assert logsumexp.dtype == torch.float32
        with pytest.raises(RuntimeError, match="value must have the key's length S"):
            ops.attention(query, query, query[:, :, :3])


def test_fake_cuda_tensors_give_fake_cuda_results() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 4, 5, 8, device="cuda", dtype=torch.bfloat16)
        output, logsumexp, _, _ = ops.attention(query, query, query)
    assert output.device.type == logsumexp.device.type == "cuda"
    assert (output.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
