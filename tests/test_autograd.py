"""Derivatives of the raw ops: first, second, third, forward mode, and autograd's own machinery."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attention_ext import reference
from cases import Case, PackedCase, differentiable, params, raw, raw_packed
from tiers import OTHER_TIERS, run_pytest

ops: Any = torch.ops.attention_ext

# Small enough for every entry of the Jacobian.
TOY: list[Case | PackedCase] = [
    Case("plain", 3, 4, 3, 2, batch=(1,)),
    Case("unbatched", 3, 2, 1, batch=()),
    Case("grouped", 3, 4, 2, batch=(1,), heads=4, kv_heads=2, is_causal=True),
    Case("mask", 5, 4, 3, batch=(1,), mask="BHLS", dead_rows=True),
    Case("bias", 5, 4, 3, batch=(2,), heads=1, bias="1HLS", dead_rows=True),
    Case("bias_of_keys", 3, 4, 3, bias="B11S", heads=2, key_mask="float"),
    Case("window", 4, 5, 3, batch=(1,), window=(1, 1), query_offset=-2, sinks=True),
    Case("cap", 3, 4, 3, batch=(1,), softcap=1.3, alibi="H", scale=0.7),
    Case("dropout", 3, 5, 3, batch=(1,), dropout_p=0.4, sinks=True, query_offset="per batch"),
    Case(
        "everything", 3, 5, 3, 2, batch=(1,), heads=2, kv_heads=1, mask="LS", bias="BHLS",
        key_mask="bool", window=(3, 2), query_offset=1, softcap=2.0, sinks=True, alibi="BH",
        dropout_p=0.3,
    ),
    PackedCase(
        "packed", (2, 0, 3), (3, 2, 2), 3, 2, heads=2, kv_heads=1, is_causal=True, sinks=True,
        query_offset="per batch", alibi="BH", dropout_p=0.3, softcap=2.0,
    ),
]  # fmt: skip

# Beyond two tiles (tiles are at most 96 by 96), odd sizes: along random directions.
LARGE: list[Case | PackedCase] = [
    Case("large_plain", 200, 210, 3, 5, batch=(1,), heads=1),
    Case("large_causal", 210, 201, 5, 3, batch=(1,), heads=2, kv_heads=1, is_causal=True),
    Case("large_mask", 200, 210, 3, batch=(1,), heads=1, mask="BHLS", dead_rows=True, sinks=True),
    Case("large_bias", 200, 210, 3, batch=(2,), heads=1, bias="1HLS", dead_rows=True),
    Case("large_keys", 3, 1100, 5, batch=(1,), heads=2, bias="1H1S", key_mask="bool"),
    Case(
        "large_everything", 201, 210, 3, 5, batch=(1,), heads=2, kv_heads=1, mask="11LS",
        bias="1HLS", key_mask="float", window=(150, 30), query_offset=5, softcap=2.0, sinks=True,
        alibi="H", dropout_p=0.3, layout="heads_last",
    ),
    PackedCase(
        "large_packed", (130, 5, 99), (100, 3, 201), 3, 5, heads=2, kv_heads=1, sinks=True,
        window=(120, 40), alibi="H", dropout_p=0.2,
    ),
]  # fmt: skip


@pytest.fixture
def _one_thread() -> None:
    """At these sizes torch's own operators in the dense formulas are fastest on one thread."""
    torch.set_num_threads(1)


def _leaves_and_call(case: Case | PackedCase) -> tuple[list[Tensor], Callable[..., Any]]:
    """The differentiable tensors, and (output, logsumexp, raw arguments) as a function of them."""
    args, kwargs = case.make(torch.float64, requires_grad=True)
    leaves = differentiable(args, kwargs)
    arrange = raw_packed if isinstance(case, PackedCase) else raw

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(leaves, values, strict=True))
        tensors = [named.pop(name) for name in ("query", "key", "value")] + list(args[3:])
        raw_args, raw_kwargs = arrange(tensors, {**kwargs, **named})
        output, logsumexp, residual, _ = ops.attention(*raw_args, **raw_kwargs)
        return output, logsumexp, residual, raw_args, raw_kwargs

    return list(leaves.values()), call


def _outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        output, logsumexp = call(*values)[:2]
        return output, logsumexp.nan_to_num(neginf=0.0)  # a difference of infinities is NaN

    return function


def _weights(call: Callable[..., Any], average_heads: bool) -> Callable[..., Any]:
    def function(*values: Tensor) -> Tensor:
        _, logsumexp, residual, raw_args, raw_kwargs = call(*values)
        tensors = (*raw_args[:2], *raw_args[3:], logsumexp, residual)
        return ops.attention_weights(*tensors, **raw_kwargs, average_heads=average_heads)

    return function


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", params(TOY))
def test_gradcheck_at_toy_sizes(case: Case | PackedCase) -> None:
    leaves, call = _leaves_and_call(case)
    assert gradcheck(_outputs(call), leaves, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", params(TOY))
def test_gradgradcheck_at_toy_sizes(case: Case | PackedCase) -> None:
    leaves, call = _leaves_and_call(case)
    assert gradgradcheck(_outputs(call), leaves, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", params(LARGE))
def test_gradcheck_beyond_two_tiles(case: Case | PackedCase) -> None:
    leaves, call = _leaves_and_call(case)
    assert gradcheck(_outputs(call), leaves, fast_mode=True)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("case", params(LARGE))
def test_gradgradcheck_beyond_two_tiles(case: Case | PackedCase) -> None:
    leaves, call = _leaves_and_call(case)
    assert gradgradcheck(_outputs(call), leaves, fast_mode=True)


WEIGHTED = [case for case in TOY + LARGE if isinstance(case, Case)]


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("average_heads", [False, True])
@pytest.mark.parametrize("case", params(WEIGHTED))
def test_gradcheck_of_weights(case: Case, average_heads: bool) -> None:
    leaves, call = _leaves_and_call(case)
    del leaves[2]  # the value has no part in the weights

    def function(*values: Tensor) -> Tensor:
        value = torch.zeros(*values[1].shape[:-1], 1, dtype=torch.float64)
        result: Tensor = _weights(call, average_heads)(*values[:2], value, *values[2:])
        return result

    assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=case in TOY)
    assert gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=case in TOY)


@pytest.mark.slow
@pytest.mark.parametrize("tier", OTHER_TIERS)
def test_gradients_in_every_tier(tier: str) -> None:
    run_pytest(
        "tests/test_autograd.py",
        "-k",
        "beyond_two_tiles or (gradcheck_of_weights and large)",
        tier=tier,
    )


# Autograd's machinery.


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _five() -> dict[str, Tensor]:
    return {
        "query": _random(2, 4, 5, 3),
        "key": _random(2, 2, 6, 3),
        "value": _random(2, 2, 6, 4),
        "attn_bias": _random(2, 1, 5, 6),
        "sinks": _random(4),
    }


class Recorder(TorchDispatchMode):
    """Remembers every op of ours that reaches the backend, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "attention_ext":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))


SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join("qkvbs"[n] for n in s))
def test_any_subset_of_inputs_may_require_grad(subset: tuple[int, ...]) -> None:
    tensors = _five()
    names = list(tensors)
    output, logsumexp, _, _ = ops.attention(**tensors)
    whole = torch.autograd.grad((output**2).sum() + logsumexp.sin().sum(), list(tensors.values()))
    for n, name in enumerate(names):
        tensors[name] = tensors[name].detach().requires_grad_(n in subset)
    output, logsumexp, residual, _ = ops.attention(**tensors)
    assert output.requires_grad and logsumexp.requires_grad and not residual.requires_grad
    with Recorder() as recorder:
        ((output**2).sum() + logsumexp.sin().sum()).backward()
    ((name, args),) = recorder.calls
    assert name == "attention_backward" and list(args[18]) == [n in subset for n in range(5)]
    for n, name in enumerate(names):
        gradient = tensors[name].grad
        if n in subset:
            torch.testing.assert_close(gradient, whole[n])
        else:
            assert gradient is None


def test_no_node_is_recorded_when_nothing_requires_grad() -> None:
    tensors = {name: x.detach() for name, x in _five().items()}
    assert ops.attention(**tensors)[0].grad_fn is None
    with torch.no_grad():
        assert ops.attention(**_five())[0].grad_fn is None
    with torch.inference_mode():
        assert ops.attention(**_five())[0].is_inference()


def test_gradients_equal_those_of_the_reference_with_both_outputs_used() -> None:
    tensors = _five()
    mask = torch.rand(5, 6) > 0.3
    options = {"attn_bias": tensors["attn_bias"], "sinks": tensors["sinks"]}
    args = [tensors[name] for name in ("query", "key", "value")]
    theirs = reference.attention(*args, mask, **options, is_causal=True, return_lse=True)
    ours = ops.attention(*args, mask, **options, is_causal=True)
    weight_out, weight_lse = torch.randn_like(theirs[0]), torch.randn_like(theirs[1])
    results = []
    for output, logsumexp in (theirs, ours[:2]):
        loss = (output * weight_out).sum() + (logsumexp * weight_lse).sum()
        results.append(torch.autograd.grad(loss, list(tensors.values())))
    torch.testing.assert_close(results[1], results[0])


def test_gradient_through_logsumexp_alone() -> None:
    tensors = _five()
    logsumexp = ops.attention(**tensors)[1]
    args = [tensors[name] for name in ("query", "key", "value")]
    expected = reference.attention(
        *args, attn_bias=tensors["attn_bias"], sinks=tensors["sinks"], return_lse=True
    )[1]
    names = ["query", "key", "attn_bias", "sinks"]
    wanted = [tensors[name] for name in names]
    ours = torch.autograd.grad(logsumexp.sin().sum(), [*wanted, tensors["value"]])
    torch.testing.assert_close(ours[:4], torch.autograd.grad(expected.sin().sum(), wanted))
    assert not ours[4].any()


def test_missing_incoming_gradients_reach_the_backward_op_as_none() -> None:
    tensors = _five()
    output, logsumexp, _, _ = ops.attention(**tensors)
    with Recorder() as recorder:
        output.sum().backward(retain_graph=True)
        logsumexp.sum().backward()
    assert [[x is None for x in args[:2]] for _, args in recorder.calls] == [
        [False, True],
        [True, False],
    ]


def test_grad_of_weights_reaches_every_input() -> None:
    tensors = _five()
    args = [tensors[name] for name in ("query", "key", "value")]
    options = (None, tensors["attn_bias"], None, tensors["sinks"], *(None,) * 5)
    _, logsumexp, residual, _ = ops.attention(*args, *options)
    ours = ops.attention_weights(*args[:2], *options, logsumexp, residual)
    theirs = reference.attention(
        *args, attn_bias=tensors["attn_bias"], sinks=tensors["sinks"], return_weights=True
    )[1]
    torch.testing.assert_close(ours, theirs)
    wanted = [tensors[name] for name in ("query", "key", "attn_bias", "sinks")]
    incoming = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted, incoming), torch.autograd.grad(theirs, wanted, incoming)
    )


def test_a_loss_of_weights_alone_runs_their_backward_alone() -> None:
    query = _random(1, 2, 5, 3)
    _, logsumexp, residual, _ = ops.attention(query, query, query)
    weights = ops.attention_weights(query, query, *(None,) * 9, logsumexp, residual)
    with Recorder() as recorder:
        weights.square().sum().backward()
    assert [name for name, _ in recorder.calls] == ["attention_weights_backward"]


def test_gradients_are_fresh_dense_memory_in_the_stated_layout() -> None:
    key = _random(1, 2, 1, 3)
    value = _random(1, 1, 6, 4)
    bias = _random(1, 1, 1, 6)
    output, _, _, _ = ops.attention(
        _random(2, 4, 5, 3), key.expand(2, 2, 6, 3), value.expand(2, 2, 6, 4), attn_bias=bias
    )
    captured: list[Any] = []

    class Keep(Recorder):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func._opname == "attention_backward":
                captured.extend(result)
            return result

    with Keep():
        output.sum().backward()
    grad_query, grad_key, grad_value, grad_bias, grad_sinks = captured
    assert grad_sinks is None
    assert grad_query.is_contiguous()  # as the query is
    for grad in (grad_key, grad_value):
        assert grad.transpose(1, 2).is_contiguous()
    assert grad_bias.shape == bias.shape and grad_bias.is_contiguous()
    pointers = {x.untyped_storage().data_ptr() for x in captured[:4]}
    assert len(pointers) == 4
    assert key.grad is not None and key.grad.shape == key.shape


def test_outputs_share_no_memory_with_inputs_or_each_other() -> None:
    value = _random(1, 1, 1, 3).bfloat16()
    query = _random(1, 1, 1, 3).bfloat16()
    results = ops.attention(query, value, value)
    storages = [x.untyped_storage().data_ptr() for x in (*results, query, value)]
    assert len(set(storages)) == 6


@pytest.mark.parametrize("layout", ["expanded", "strided", "undefined rows"])
def test_incoming_gradients_may_have_any_strides(layout: str) -> None:
    tensors = _five()
    output = ops.attention(**tensors)[0]
    incoming = torch.randn_like(output).contiguous()
    if layout == "expanded":
        strided = incoming[:1, :1, :1, :1].expand(output.shape)
    elif layout == "strided":
        big = output.new_full((*output.shape[:-1], 2 * output.size(-1)), torch.nan)
        strided = big[..., ::2].copy_(incoming)
    else:
        strided = incoming.transpose(1, 3).contiguous().transpose(1, 3)
    inputs = list(tensors.values())
    ours = torch.autograd.grad(output, inputs, strided, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(output, inputs, strided.clone()))


def test_second_backward_through_freed_buffers_is_refused() -> None:
    tensors = _five()
    output = ops.attention(**tensors)[0]
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_second_double_backward_through_freed_buffers_is_refused() -> None:
    tensors = _five()
    output = ops.attention(**tensors)[0]
    (gradient,) = torch.autograd.grad((output**2).sum(), tensors["query"], create_graph=True)
    gradient.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradient.sum().backward()


def test_retained_graph_gives_the_same_gradients_again() -> None:
    tensors = _five()
    output = ops.attention(**tensors)[0]
    inputs = list(tensors.values())
    first = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(output.sum(), inputs)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias", "sinks", "output", "lse"])
def test_change_in_place_before_backward_is_detected(name: str) -> None:
    tensors = {n: x * 1.0 for n, x in _five().items()}
    output, logsumexp, _, _ = ops.attention(**tensors)
    loss = output.sum() + logsumexp.sum()
    changed = {"output": output, "lse": logsumexp, **tensors}[name]
    with torch.no_grad():
        changed.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_change_of_a_mask_in_place_before_backward_is_detected() -> None:
    tensors = _five()
    mask = torch.ones(5, 6, dtype=torch.bool)
    output = ops.attention(attn_mask=mask, **tensors)[0]
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_saved_tensor_hooks_see_each_saved_tensor_and_may_replace_it() -> None:
    tensors = _five()
    inputs = list(tensors.values())
    state = torch.tensor([1, 2, 0, 0, 0, 0])
    expected = torch.autograd.grad(ops.attention(**tensors)[0].sum(), inputs)
    counts = []
    for dropout_p in (0.0, 0.5):
        packed: list[Tensor] = []

        def pack(x: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(x)
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = ops.attention(**tensors, rng_state=state, dropout_p=dropout_p)[0]
        counts.append(len(packed))
        if dropout_p == 0.0:
            torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), expected)
    # q, k, v, bias, sinks, output, logsumexp, its residual; the state only with dropout.
    assert counts == [8, 9]


def test_saved_tensors_on_disk_or_cpu_give_second_derivatives_too() -> None:
    query = _random(1, 2, 5, 3)
    with torch.autograd.graph.save_on_cpu():
        output = ops.attention(query, query, query)[0]
        (gradient,) = torch.autograd.grad((output**3).sum(), query, create_graph=True)
        (ours,) = torch.autograd.grad((gradient**2).sum(), query)
    output = ops.attention(query, query, query)[0]
    (gradient,) = torch.autograd.grad((output**3).sum(), query, create_graph=True)
    (expected,) = torch.autograd.grad((gradient**2).sum(), query)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_same_dropout(use_reentrant: bool) -> None:
    tensors = _five()
    inputs = list(tensors.values())

    def block(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        seed = torch.randint(0, 2**62, (2,))
        state = torch.cat([seed, torch.zeros(4, dtype=torch.int64)])
        result: Tensor = ops.attention(
            query, key, value, attn_bias=bias, sinks=sinks, rng_state=state, dropout_p=0.4
        )[0]
        return result

    torch.manual_seed(3)
    expected = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    torch.manual_seed(3)
    checkpointed = checkpoint(block, *inputs, use_reentrant=use_reentrant)
    checkpointed.square().sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], list(expected))


def test_anomaly_mode_names_the_node_that_made_nan() -> None:
    query = torch.full((1, 1, 2, 3), torch.nan, dtype=torch.float64, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        output = ops.attention(query, query, query)[0]
        with pytest.raises(RuntimeError, match=r"AttentionBackward.*returned nan"):
            output.sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_accepts_dead_rows() -> None:
    query = _random(1, 2, 5, 3)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        output, logsumexp, _, _ = ops.attention(query, query, query, mask)
        (output.sum() + logsumexp[..., 0].sum()).backward()
    assert query.grad is not None and not query.grad[0, :, 1].isnan().any()


def test_hidden_nan_is_not_felt_by_first_derivatives() -> None:
    query, key, value = _random(1, 2, 5, 3), _random(1, 2, 6, 3), _random(1, 2, 6, 4)
    mask = torch.rand(5, 6) > 0.3
    mask[:, 4] = False
    clean = ops.attention(query, key, value, mask)[0]
    expected = torch.autograd.grad(clean.square().sum(), (query, key, value))
    with torch.no_grad():
        key[:, :, 4] = torch.nan
        value[:, :, 4] = torch.inf
    output = ops.attention(query, key, value, mask)[0]
    ours = torch.autograd.grad(output.square().sum(), (query, key, value))
    torch.testing.assert_close(output, clean)
    torch.testing.assert_close(ours, expected)
    assert not ours[1][:, :, 4].any() and not ours[2][:, :, 4].any()


def test_nan_hidden_from_every_row_is_not_felt_by_second_and_forward_derivatives() -> None:
    mask = torch.rand(5, 6) > 0.3
    mask[:, 4] = False
    query, key, value = _random(1, 2, 5, 3), _random(1, 2, 6, 3), _random(1, 2, 6, 4)

    def second(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        output = ops.attention(query, key, value, mask)[0]
        first = torch.autograd.grad((output**3).sum(), (query, key, value), create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in first), (query, key, value))

    def forward(key: Tensor, value: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(
            lambda q: ops.attention(q, key, value, mask)[0],
            (query.detach(),),
            (torch.ones_like(query),),
        )[1]
        return tangent

    expected = second(key, value), forward(key.detach(), value.detach())
    with torch.no_grad():
        bad_key, bad_value = key.clone(), value.clone()
        bad_key[:, :, 4] = torch.nan
        bad_value[:, :, 4] = torch.inf
    ours = (
        second(bad_key.requires_grad_(), bad_value.requires_grad_()),
        forward(bad_key.detach(), bad_value.detach()),
    )
    torch.testing.assert_close(ours, expected)


def test_second_derivatives_in_half_precision_keep_their_dtypes() -> None:
    query = _random(1, 2, 5, 8, dtype=torch.bfloat16)
    bias = _random(5, 5, dtype=torch.float32)
    output = ops.attention(query, query, query, attn_bias=bias)[0]
    first = torch.autograd.grad(output.float().square().sum(), (query, bias), create_graph=True)
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), (query, bias))
    assert [x.dtype for x in (*first, *second)] == [torch.bfloat16, torch.float32] * 2


def test_third_derivatives() -> None:
    tensors = [torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(3)]

    def third(function: Callable[..., Any]) -> Tensor:
        query = tensors[0].clone().requires_grad_()
        derivative = function(query, *tensors[1:]).pow(3).sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), query, create_graph=True)
        return derivative.detach()

    ours = third(lambda q, k, v: ops.attention(q, k, v, is_causal=True, softcap=2.0)[0])
    theirs = third(lambda q, k, v: reference.attention(q, k, v, is_causal=True, softcap=2.0))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", ["L", "S", "E", "Ev", "B", "H"])
def test_gradients_of_zero_sized_inputs_are_zero_or_empty(shape: str) -> None:
    sizes = {"B": 2, "H": 2, "L": 3, "S": 4, "E": 3, "Ev": 5} | {shape: 0}
    query = _random(sizes["B"], sizes["H"], sizes["L"], sizes["E"])
    key = _random(sizes["B"], sizes["H"], sizes["S"], sizes["E"])
    value = _random(sizes["B"], sizes["H"], sizes["S"], sizes["Ev"])
    output, logsumexp, residual, _ = ops.attention(query, key, value)
    assert output.shape == (*query.shape[:3], sizes["Ev"])
    (output.sum() + logsumexp.nan_to_num(neginf=0.0).sum()).backward(retain_graph=True)
    expected = [x.detach().requires_grad_() for x in (query, key, value)]
    theirs, their_lse = reference.attention(*expected, return_lse=True)
    torch.testing.assert_close((output, logsumexp), (theirs, their_lse))
    (theirs.sum() + their_lse.nan_to_num(neginf=0.0).sum()).backward()
    for ours, other in zip((query, key, value), expected, strict=True):
        assert ours.grad is not None
        want = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(ours.grad, want)
    weights = ops.attention_weights(query, key, *(None,) * 9, logsumexp, residual)
    assert weights.shape == (*query.shape[:3], sizes["S"])
    weights.sum().backward()


def test_gradients_of_shared_query_key_and_value_add_up() -> None:
    x = _random(1, 2, 5, 3)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    ops.attention(x, x, x)[0].square().sum().backward()
    ops.attention(*apart)[0].square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, sum(a.grad for a in apart if a.grad is not None))


def test_backward_in_another_thread() -> None:
    import threading

    tensors = _five()
    inputs = list(tensors.values())
    output = ops.attention(**tensors)[0]
    expected = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(torch.autograd.grad(output.sum(), inputs))
    )
    thread.start()
    thread.join()
    torch.testing.assert_close(results, list(expected))
