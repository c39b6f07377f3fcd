"""The numbers of MultiheadAttention against torch.nn.MultiheadAttention's, option by option."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_ext.modules import MultiheadAttention
from module_cases import (
    ATTN_MASKS,
    CONFIGS,
    PADDING_MASKS,
    E,
    H,
    L,
    N,
    S,
    gradients,
    make_inputs,
    make_masks,
    pair,
    slow,
)
from watch import Watch


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", ["self", slow("cross"), slow("three"), "unbatched"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equals_torch_for_every_combination_of_masks(config: dict[str, Any], kind: str) -> None:
    theirs, ours = pair(**config)
    leaves, qkv = make_inputs(kind, config)
    keys = qkv[1].size(1 if config.get("batch_first") and kind != "unbatched" else 0)
    for n, (attn, padding) in enumerate(itertools.product(ATTN_MASKS, PADDING_MASKS)):
        masks = make_masks(attn, padding, keys, kind)
        floats = [m.requires_grad_() for m in masks.values() if m.is_floating_point()]
        results = []
        for module in (theirs, ours):
            out, weights = module(*qkv, average_attn_weights=n % 2 == 0, **masks)
            wanted = [*module.parameters(), *leaves, *floats]
            results.append((out, weights, gradients(out, weights, wanted)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)
        assert results[1][0].is_contiguous()
        out, none = ours(*qkv, need_weights=False, **masks)
        assert none is None
        assert torch.equal(out, results[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_is_as_accurate_as_torch_in_every_dtype(dtype: torch.dtype, masked: bool) -> None:
    exact, _ = pair()
    theirs = copy.deepcopy(exact).to(dtype)
    ours = MultiheadAttention(E, H, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    exact.load_state_dict(theirs.state_dict())
    x = torch.randn(64, N, E, dtype=dtype)
    masks: dict[str, Tensor] = {}
    if masked:
        masks["key_padding_mask"] = torch.arange(64) >= torch.tensor([[40], [64]])
        masks["attn_mask"] = torch.ones(64, 64, dtype=torch.bool).triu(1)
    wide = x.double()
    right, right_weights = exact(wide, wide, wide, **masks)
    out, weights = ours(x, x, x, **masks)
    out_torch, weights_torch = theirs(x, x, x, **masks)
    assert out.dtype == weights.dtype == dtype
    eps = torch.finfo(dtype).eps
    for mine, torchs, truth in ((out, out_torch, right), (weights, weights_torch, right_weights)):
        error = (mine.double() - truth).abs().max()
        assert error <= 2 * (torchs.double() - truth).abs().max() + eps * truth.abs().max()


def modes() -> list[Any]:
    def run(training: bool, context: Callable[[], Any]) -> Callable[[nn.Module, Any], Any]:
        def call(module: nn.Module, arguments: Any) -> Any:
            module.train(training)
            with context():
                return module(*arguments[0], **arguments[1])

        return call

    return [
        pytest.param(run(True, torch.enable_grad), id="train"),
        pytest.param(run(False, torch.enable_grad), id="eval"),
        pytest.param(run(False, torch.no_grad), id="no_grad"),
        pytest.param(run(False, torch.inference_mode), id="inference_mode"),
    ]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mode", modes())
def test_result_does_not_depend_on_mode_or_need_weights(mode: Any, batch_first: bool) -> None:
    # An even number of heads, q is k is v: what torch's module has a fast path for.
    module = MultiheadAttention(E, 4, batch_first=batch_first)
    x = torch.randn(N, L, E) if batch_first else torch.randn(L, N, E)
    masks = {"key_padding_mask": torch.tensor([[False] * L, [False] * (L - 2) + [True] * 2])}
    for extra in ({}, masks, {"attn_mask": torch.randn(L, L)}):
        expected, _ = module.train()(x, x, x, need_weights=False, **extra)
        for need_weights in (False, True):
            call = ((x, x, x), {"need_weights": need_weights, **extra})
            out, weights = mode(module, call)
            with Watch() as seen:
                mode(module, call)
            assert torch.equal(out, expected)
            assert (weights is not None) == need_weights
            assert seen.ours == 1
            assert seen.other_ways == []


@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32])
@pytest.mark.parametrize("mode", modes())
def test_row_that_sees_no_key_is_zero_before_out_proj(mode: Any, mask_type: torch.dtype) -> None:
    module = MultiheadAttention(E, 4, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    before: list[Tensor] = []
    module.out_proj.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    hidden = torch.zeros(L, L, dtype=torch.bool)
    hidden[1] = True  # dead by the mask alone
    hidden[3, :3] = True  # dead together with the padding of sequence 1
    padding = torch.tensor([[False] * L, [False] * 3 + [True] * 2])
    attn_mask = hidden
    if mask_type == torch.float32:
        attn_mask = torch.zeros(L, L).masked_fill(hidden, -math.inf)
        padding = torch.zeros(N, L).masked_fill(padding, -math.inf)
    x = torch.randn(N, L, E)
    for need_weights in (False, True):
        call = ((x, x, x), {"attn_mask": attn_mask, "key_padding_mask": padding})
        call[1]["need_weights"] = need_weights
        out, weights = mode(module, call)
        for n, row in ((0, 1), (1, 1), (1, 3)):
            assert before[-1][n, row].eq(0).all()
            assert torch.equal(out[n, row], module.out_proj.bias)
            if need_weights:
                assert weights[n, row].eq(0).all()
        assert before[-1][0, 3].ne(0).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_dead_rows_add_nothing_to_any_gradient(need_weights: bool) -> None:
    # A band mask and padding deeper than the band: the last queries of a sequence see no key.
    length, band = 9, 1
    module = MultiheadAttention(E, H, dtype=torch.float64)
    x = torch.randn(length, 1, E, dtype=torch.float64)
    far = torch.arange(length)[:, None] - torch.arange(length)
    attn_mask = torch.zeros(length, length).masked_fill(far.abs() > band, -math.inf).double()
    padding = torch.arange(length)[None] >= 5
    dead = 6  # rows 6, 7 and 8
    grads = []
    for rows in (length, dead):
        out, weights = module(
            x[:rows], x, x, attn_mask=attn_mask[:rows], key_padding_mask=padding,
            need_weights=need_weights,
        )  # fmt: skip
        loss = out[:dead].square().sum()
        if weights is not None:
            loss = loss + weights.square().sum()
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    for with_dead, without in zip(*grads, strict=True):
        assert with_dead.isfinite().all()
        torch.testing.assert_close(with_dead, without, rtol=1e-9, atol=1e-12)


def test_a_dead_head_gives_zero_weights_and_the_same_output_both_ways() -> None:
    module = MultiheadAttention(3, 3)
    x = torch.randn(L, 1, 3)
    mask = torch.zeros(3, 1, 1, dtype=torch.bool)
    mask[1] = True
    mask = mask.expand(3, L, L)
    out, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    fused, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    _, average = module(x, x, x, attn_mask=mask)
    assert torch.equal(out, fused)
    assert weights[0, 1].eq(0).all()
    torch.testing.assert_close(weights[0, [0, 2]].sum(-1), torch.ones(2, L))
    torch.testing.assert_close(average, weights.sum(1) / 3)


def test_hidden_keys_may_hold_nan() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    q, kv = torch.randn(N, L, E), torch.randn(N, S, E)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[:, -2:] = True
    expected, _ = module(q, kv, kv, key_padding_mask=padding)
    kv[:, -2:] = math.nan
    out, weights = module(q, kv, kv, key_padding_mask=padding)
    torch.testing.assert_close(out, expected)
    assert weights[..., -2:].eq(0).all()


# -- is_causal --


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("config", ["plain", "bias_kv", "bias_kv and zero_attn"])
def test_is_causal_needs_no_mask(mode: Any, padding: str | None, config: str) -> None:
    theirs, ours = pair(**CONFIGS[config])
    x, kv = (torch.randn(n, N, E, dtype=torch.float64) for n in (L, S))
    later = torch.ones(L, S, dtype=torch.bool).triu(1)
    masks: dict[str, Tensor] = {}
    if padding is not None:
        hidden = torch.zeros(N, S, dtype=torch.bool)
        hidden[1, slice(0, 2) if padding == "left" else slice(S - 4, S)] = True
        masks["key_padding_mask"] = hidden
    explicit, explicit_weights = ours(x, kv, kv, attn_mask=later, **masks)
    out, weights = mode(ours, ((x, kv, kv), {"is_causal": True, **masks}))
    torch.testing.assert_close(out, explicit, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weights, explicit_weights, rtol=1e-12, atol=1e-13)
    right, right_weights = theirs(x, kv, kv, attn_mask=later, **masks)
    alive = ~right_weights.isnan().any(-1).T
    torch.testing.assert_close(out[alive], right[alive], rtol=1e-9, atol=1e-11)
    if config != "plain":
        assert weights[..., S:].ne(0).all()


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_given_mask_wins_over_is_causal(mode: Any, need_weights: bool) -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    for mask in (torch.eye(L).bool(), torch.randn(L, L)):
        call = {"attn_mask": mask, "need_weights": need_weights}
        expected, _ = module(x, x, x, **call)
        out, _ = mode(module, ((x, x, x), {"is_causal": True, **call}))
        assert torch.equal(out, expected)


# -- what torch's module does not have --


def outside_window(window: tuple[int | None, int | None], keys: int) -> Tensor:
    distance = torch.arange(keys) - torch.arange(L)[:, None]
    left, right = window
    hidden = torch.zeros(L, keys, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return hidden


@pytest.mark.parametrize("window", [(1, 0), (0, 2), (None, 1), (2, None), (0, 0)])
@pytest.mark.parametrize("attn", ATTN_MASKS)
@pytest.mark.parametrize("config", ["batch first", "bias_kv and zero_attn"])
def test_window_is_on_top_of_every_mask(
    window: tuple[int | None, int | None], attn: str | None, config: str
) -> None:
    plain = MultiheadAttention(E, H, dtype=torch.float64, **CONFIGS[config])
    windowed = MultiheadAttention(E, H, dtype=torch.float64, **CONFIGS[config], window=window)
    windowed.load_state_dict(plain.state_dict())
    _, (q, k, v) = make_inputs("three", CONFIGS[config])
    masks = make_masks(attn, "bool", S, "three")
    out, weights = windowed(q, k, v, **masks)
    hidden = outside_window(window, S)
    mask = masks.get("attn_mask", torch.zeros(L, S, dtype=torch.bool))
    if mask.dtype == torch.bool:
        masks["attn_mask"] = mask | hidden
    else:
        masks["attn_mask"] = mask.masked_fill(hidden, -math.inf)
    expected, expected_weights = plain(q, k, v, **masks)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("config", ["plain", "bias_kv"])
def test_window_and_is_causal_together_mean_both(config: str) -> None:
    plain = MultiheadAttention(E, H, dtype=torch.float64, **CONFIGS[config])
    windowed = MultiheadAttention(E, H, dtype=torch.float64, **CONFIGS[config], window=(1, 2))
    windowed.load_state_dict(plain.state_dict())
    _, (q, k, v) = make_inputs("three", CONFIGS[config])
    expected = plain(q, k, v, attn_mask=outside_window((1, 0), S))
    torch.testing.assert_close(windowed(q, k, v, is_causal=True), expected, rtol=1e-12, atol=1e-13)


def dense(module: MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Self-attention (N, L, E) by the formula, with softcap, ALiBi and sinks."""
    kv = module.num_kv_heads
    sizes = (E, kv * module.head_dim, kv * module.head_dim)
    projected = (x @ module.in_proj_weight.T + module.in_proj_bias).split(sizes, -1)
    q, k, v = (t.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for t in projected)
    heads = [h // (module.num_heads // kv) for h in range(module.num_heads)]
    scores = q @ k[:, heads].transpose(-1, -2) / math.sqrt(module.head_dim)
    if module.softcap:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    if module.alibi:
        distance = (torch.arange(L)[:, None] - torch.arange(L)).abs()
        scores = scores - torch.tensor(slopes(module.num_heads)).view(-1, 1, 1) * distance
    if module.sinks is not None:
        sink = module.sinks.view(1, -1, 1, 1).expand(N, -1, L, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights @ v[:, heads]).transpose(1, 2).flatten(2)
    return out @ module.out_proj.weight.T + module.out_proj.bias, weights


def slopes(heads: int) -> list[float]:
    """The published ALiBi slopes: 2^(-8/n), 2^(-16/n), ... for n heads, a power of two."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes(power) + slopes(2 * power)[::2][: heads - power]


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"sinks": True},
        {"alibi": True},
        {"num_kv_heads": 3},
        {"num_kv_heads": 1},
        {"softcap": 0.7, "sinks": True, "alibi": True, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_further_options_follow_their_formula(options: dict[str, Any]) -> None:
    module = MultiheadAttention(E, 6, batch_first=True, dtype=torch.float64, **options)
    for name, parameter in module.named_parameters():
        if "bias" in name or name == "sinks":
            nn.init.normal_(parameter)
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    out, weights = module(x, x, x, average_attn_weights=False)
    wanted = [x, *module.parameters()]
    grads = gradients(out, weights, wanted)
    expected, expected_weights = dense(module, x)
    expected_grads = gradients(expected, expected_weights, wanted)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("config", ["plain", "no bias", "kdim and vdim", "bias_kv"])
def test_grouped_heads_equal_repeated_key_and_value_heads(config: str) -> None:
    options = {**CONFIGS[config], "dtype": torch.float64}
    grouped = MultiheadAttention(E, 6, num_kv_heads=2, **options)
    full = MultiheadAttention(E, 6, **options)

    def repeat(x: Tensor, dim: int = 0) -> Tensor:
        heads = x.unflatten(dim, (2, 2)).repeat_interleave(3, dim if dim >= 0 else dim - 1)
        return heads.flatten(dim if dim >= 0 else dim - 1, dim + 1 if dim >= 0 else dim)

    state = dict(grouped.state_dict())
    for name, x in state.items():
        if name.startswith("in_proj"):
            q, k, v = x.split((E, 4, 4))
            state[name] = torch.cat([q, repeat(k), repeat(v)])
        elif name in ("k_proj_weight", "v_proj_weight"):
            state[name] = repeat(x)
        elif name in ("bias_k", "bias_v"):
            state[name] = repeat(x, -1)
    full.load_state_dict(state)
    assert {n: x.dim() for n, x in state.items()} == {
        n: x.dim() for n, x in full.named_parameters()
    }
    _, (q, k, v) = make_inputs("three", CONFIGS[config])
    torch.testing.assert_close(grouped(q, k, v), full(q, k, v), rtol=1e-9, atol=1e-11)


def test_alibi_slopes_are_the_published_ones_in_full_precision() -> None:
    module = MultiheadAttention(64, 8, alibi=True)
    assert module.alibi_slopes.tolist() == [2.0**-h for h in range(1, 9)]
    assert "alibi_slopes" not in module.state_dict()
    module = MultiheadAttention(60, 12, alibi=True)
    eight, sixteen = slopes(8), slopes(16)
    assert module.alibi_slopes.tolist() == pytest.approx(eight + sixteen[0:8:2], rel=1e-7)
    # Rounding to half and back must not be felt, nor a float32 detour before float64.
    assert torch.equal(module.half().float().alibi_slopes, module.alibi_slopes)
    assert module.alibi_slopes.dtype == torch.float32
    assert module.double().alibi_slopes.tolist() == eight + sixteen[0:8:2]
    empty = MultiheadAttention(64, 8, alibi=True, device="meta").to_empty(device="cpu")
    assert empty.alibi_slopes.tolist() == [2.0**-h for h in range(1, 9)]


def test_sinks_start_at_zero_and_are_a_parameter() -> None:
    module = MultiheadAttention(E, H, sinks=True)
    assert module.sinks.tolist() == [0.0] * H
    assert "sinks" in dict(module.named_parameters())
    assert "sinks" in module.state_dict()
    nn.init.ones_(module.sinks)
    module._reset_parameters()
    assert module.sinks.tolist() == [0.0] * H
    assert MultiheadAttention(E, H).sinks is None


# -- dropout --


def test_weights_are_those_that_multiplied_the_values() -> None:
    module = MultiheadAttention(E, H, dropout=0.5, batch_first=True, dtype=torch.float64)
    merged: list[Tensor] = []
    module.out_proj.register_forward_pre_hook(lambda _, args: merged.append(args[0]))
    x = torch.randn(N, 40, E, dtype=torch.float64)
    _, weights = module(x, x, x, average_attn_weights=False)
    v = (x @ module.in_proj_weight[2 * E :].T).unflatten(-1, (H, E // H)).transpose(1, 2)
    torch.testing.assert_close(merged[0], (weights @ v).transpose(1, 2).flatten(2))
    dropped = weights.eq(0).double().mean().item()
    assert abs(dropped - 0.5) < 0.03
    _, kept = module.eval()(x, x, x, average_attn_weights=False)
    assert kept.ne(0).all()
    live = weights.ne(0)
    torch.testing.assert_close(weights[live], 2 * kept[live])


def test_averaged_weights_see_the_same_dropout_as_the_output() -> None:
    module = MultiheadAttention(E, H, dropout=0.4)
    x = torch.randn(L, N, E)
    results = {}
    for average in (True, False, None):
        torch.manual_seed(3)
        results[average] = module(
            x, x, x, need_weights=average is not None, average_attn_weights=bool(average)
        )
    assert torch.equal(results[True][0], results[None][0])
    assert torch.equal(results[False][0], results[None][0])
    torch.testing.assert_close(results[True][1], results[False][1].mean(1))


def test_dropout_is_off_in_evaluation_and_draws_nothing_then() -> None:
    module = MultiheadAttention(E, H, dropout=0.9)
    module.eval()
    x = torch.randn(L, N, E)
    state = torch.get_rng_state()
    first, _ = module(x, x, x)
    second, _ = module(x, x, x)
    assert torch.equal(first, second)
    module.train().dropout = 0.0
    assert torch.equal(module(x, x, x)[0], first)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_one_leaves_the_bias_and_finite_gradients() -> None:
    module = MultiheadAttention(E, H, dropout=1.0)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(L, N, E)
    out, weights = module(x, x, x)
    assert torch.equal(out, module.out_proj.bias.expand(L, N, E))
    assert weights.eq(0).all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert module.in_proj_weight.grad.eq(0).all()


@pytest.mark.parametrize("dropout", [-0.1, 1.1, math.nan])
def test_dropout_outside_its_range_is_an_error(dropout: float) -> None:
    module = MultiheadAttention(E, H, dropout=dropout)
    x = torch.randn(L, N, E)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        module(x, x, x)
    module.eval()(x, x, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_dropout(reentrant: bool) -> None:
    module = MultiheadAttention(E, H, dropout=0.5)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        module.zero_grad()
        x = torch.randn(L, N, E, requires_grad=True)
        if checkpointed:
            call = torch.utils.checkpoint.checkpoint
            out = call(lambda x: module(x, x, x)[0], x, use_reentrant=reentrant)
        else:
            out = module(x, x, x)[0]
        out.square().sum().backward()
        grads.append([p.grad for p in (x, *module.parameters())])
    torch.testing.assert_close(grads[0], grads[1])
