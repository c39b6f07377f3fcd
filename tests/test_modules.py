"""MultiheadAttention against torch.nn.MultiheadAttention, option by option.

L, S, N and E are different numbers throughout, so that a swapped dimension shows.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import attention_ext as ae
from attention_ext.modules import MultiheadAttention
from tiers import run_python
from watch import Watch

N, L, S, E, H = 2, 5, 7, 12, 3

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "kdim and vdim": {"kdim": 8, "vdim": 10},
    "kdim, batch first, bias_kv": {"kdim": 8, "batch_first": True, "add_bias_kv": True},
    "vdim, no bias, zero_attn": {"vdim": 10, "bias": False, "add_zero_attn": True},
}
ATTN_MASKS = (None, "bool 2-D", "float 2-D", "bool 3-D", "float 3-D")
PADDING_MASKS = (None, "bool", "float")


def slow(*values: Any) -> Any:
    """A parameter that `make check` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pair(dtype: torch.dtype = torch.float64, **config: Any) -> tuple[nn.Module, MultiheadAttention]:
    """torch's module and ours with equal parameters, the biases not zero."""
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **config)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, dtype=dtype, **config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(
    kind: str, config: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(leaves, (query, key, value)): leaves are what the three are made of."""
    kdim, vdim = config.get("kdim") or E, config.get("vdim") or E
    same_size = kdim == vdim == E

    def leaf(length: int, size: int) -> Tensor:
        shape = [N, length] if config.get("batch_first") else [length, N]
        shape = [length] if kind == "unbatched" else shape
        return torch.randn(*shape, size, dtype=dtype, requires_grad=True)

    query = leaf(L, E)
    if kind == "self" and same_size:
        return [query], (query, query, query)
    key = leaf(S, kdim)
    if kind == "cross" and kdim == vdim:
        return [query, key], (query, key, key)
    value = leaf(S, vdim)
    return [query, key, value], (query, key, value)


def make_masks(
    attn: str | None, padding: str | None, keys: int, kind: str, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Masks of torch's polarity that leave key 0 visible to everybody."""
    masks: dict[str, Tensor] = {}
    batch = 1 if kind == "unbatched" else N
    if attn is not None:
        shape = (L, keys) if "2-D" in attn else (batch * H, L, keys)
        masks["attn_mask"] = torch.rand(shape) < 0.4 if "bool" in attn else torch.randn(shape)
    if padding is not None:
        shape = (keys,) if kind == "unbatched" else (N, keys)
        mask = torch.rand(shape) < 0.4 if padding == "bool" else torch.randn(shape)
        masks["key_padding_mask"] = mask
    for name, mask in masks.items():
        if mask.dtype == torch.bool:
            mask[..., 0] = False
        else:
            mask[..., -1] = -math.inf
            masks[name] = mask.to(dtype)
    return masks


def gradients(out: Tensor, weights: Tensor | None, wanted: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss that depends on every entry of the output and of the weights."""
    torch.manual_seed(5)  # and not randn_like, which follows the strides
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, dtype=out.dtype)).sum()
    return list(torch.autograd.grad(loss, wanted))


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


# -- parameters, state, copies --


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equal_seeds_give_torchs_parameters(config: dict[str, Any]) -> None:
    torch.manual_seed(11)
    theirs = nn.MultiheadAttention(E, H, **config)
    after = torch.rand(1)
    torch.manual_seed(11)
    ours = MultiheadAttention(E, H, **config)
    assert torch.equal(torch.rand(1), after)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x), name
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_is_torchs_module_to_the_outside() -> None:
    for config in CONFIGS.values():
        theirs, ours = pair(**config)
        assert isinstance(ours, nn.MultiheadAttention)
        for name in vars(theirs):
            if name.startswith("_") and name != "_qkv_same_embed_dim":
                continue
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("in_proj_weight", "q_proj_weight", "bias_k", "in_proj_bias"):
            assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
        assert type(ours.out_proj) is type(theirs.out_proj)
    theirs_init = list(inspect.signature(nn.MultiheadAttention.__init__).parameters.values())
    ours_init = list(inspect.signature(MultiheadAttention.__init__).parameters.values())
    for a, b in zip(theirs_init, ours_init, strict=False):
        assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)
    assert all(p.kind is p.KEYWORD_ONLY for p in ours_init[len(theirs_init) :])
    for a, b in zip(
        inspect.signature(nn.MultiheadAttention.forward).parameters.values(),
        inspect.signature(MultiheadAttention.forward).parameters.values(),
        strict=True,
    ):
        assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, "pickle", "replicate"])
def test_copies_compute_the_same(duplicate: Any) -> None:
    module = MultiheadAttention(
        E, 6, window=(2, 1), softcap=3.0, sinks=True, alibi=True, num_kv_heads=2
    )
    nn.init.normal_(module.sinks)
    x = torch.randn(L, N, E)
    if duplicate == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif duplicate == "replicate":  # what DataParallel does on every device
        other = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(other, name, parameter)
        other.out_proj = module.out_proj
    else:
        other = duplicate(module)
    assert type(other) is MultiheadAttention
    torch.testing.assert_close(other(x, x, x), module(x, x, x), rtol=0, atol=0)
    assert len(other._forward_hooks) == len(module._forward_hooks)
    assert repr(other) == repr(module)


@pytest.mark.slow
def test_pickle_loads_in_a_process_that_imports_nothing_by_hand(tmp_path: Path) -> None:
    module = MultiheadAttention(E, 4, batch_first=True).eval()
    x = torch.randn(N, L, E)
    torch.save((module, x, module(x, x, x)), tmp_path / "module.pt")
    code = f"""
import torch
module, x, expected = torch.load({str(tmp_path / "module.pt")!r}, weights_only=False)
print(type(module).__module__, all(torch.equal(a, b) for a, b in zip(module(x, x, x), expected)))
handle = module.register_forward_hook(lambda *_: None)
handle.remove()
layer = torch.nn.TransformerEncoderLayer({E}, 4, batch_first=True).eval()
layer.self_attn = module
module.out_proj.register_forward_pre_hook(lambda *_: print("called"))
module.out_proj._forward_pre_hooks.clear()
seen = []
forward = type(module).forward
type(module).forward = lambda *a, **k: seen.append(1) or forward(*a, **k)
with torch.no_grad():
    layer(x)
print(len(seen))
"""
    assert run_python(code).stdout.split() == ["attention_ext.modules", "True", "1"]


def test_pickles_of_earlier_versions_load() -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    state = copy.deepcopy(module.__dict__)
    for name in (
        "num_kv_heads",
        "window",
        "softcap",
        "alibi",
        "batch_first",
        "_qkv_same_embed_dim",
    ):
        del state[name]
    del state["_parameters"]["sinks"]
    del state["_buffers"]["alibi_slopes"]
    state["_forward_hooks"].clear()
    old = MultiheadAttention.__new__(MultiheadAttention)
    old.__setstate__(state)
    torch.testing.assert_close(old(x, x, x), module(x, x, x), rtol=0, atol=0)
    assert list(old.state_dict()) == list(module.state_dict())
    assert len(old._forward_hooks) == 1


# -- things people do to the module --


def test_out_proj_is_called_as_a_module_and_its_weight_read_at_call_time() -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    fired: list[Tensor] = []
    module.out_proj.register_forward_hook(lambda m, args, out: fired.append(args[0]))
    out, _ = module(x, x, x)
    assert len(fired) == 1
    module.out_proj.weight = nn.Parameter(2 * module.out_proj.weight.detach())
    doubled, _ = module(x, x, x)
    torch.testing.assert_close(doubled, 2 * out)
    module.out_proj = nn.Sequential(module.out_proj, nn.Flatten(2), nn.ReLU())
    torch.testing.assert_close(module(x, x, x)[0], doubled.relu())


def test_parametrizations_and_pruning_on_weights_are_obeyed() -> None:
    x = torch.randn(L, N, E, dtype=torch.float64)

    def change(module: nn.Module) -> None:
        torch.manual_seed(2)
        parametrizations.weight_norm(module, "in_proj_weight")
        module.parametrizations.in_proj_weight.original0.data.mul_(1.5)
        parametrizations.spectral_norm(module.out_proj, "weight")
        prune.random_unstructured(module, "in_proj_bias", 0.5)

    theirs, ours = pair()
    before, _ = ours(x, x, x)
    change(theirs.eval())
    change(ours.eval())
    out, _ = ours(x, x, x)
    torch.testing.assert_close(out, theirs(x, x, x)[0], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(out, before)


def test_per_sample_gradients_equal_a_loop() -> None:
    module = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    x = torch.randn(3, L, E, dtype=torch.float64)
    padding = torch.rand(3, L) < 0.3
    padding[:, 0] = False

    def loss(parameters: Any, x: Tensor, padding: Tensor) -> Tensor:
        arguments = (x[None],) * 3
        call = torch.func.functional_call
        out, weights = call(module, parameters, arguments, {"key_padding_mask": padding[None]})
        return out.square().sum() + weights.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, padding)
    for n in range(3):
        alone = torch.func.grad(loss)(parameters, x[n], padding[n])
        for name, grad in alone.items():
            torch.testing.assert_close(grads[name][n], grad, rtol=1e-9, atol=1e-11)


def test_torch_jit_script_says_it_is_not_supported() -> None:
    for module in (MultiheadAttention(E, H), nn.Sequential(MultiheadAttention(E, H))):
        with pytest.raises(NotImplementedError, match=r"does not support torch\.jit\.script"):
            torch.jit.script(module)


# -- masks: types, sizes, memory --


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("config", ["batch first", "bias_kv and zero_attn"])
def test_masks_keep_their_precision_under_autocast(
    dtype: torch.dtype, mask_type: torch.dtype, config: str
) -> None:
    exact, _ = pair(**CONFIGS[config])
    ours = MultiheadAttention(E, H, **CONFIGS[config])
    ours.load_state_dict(exact.state_dict())
    x = torch.randn(N, L, E) if CONFIGS[config].get("batch_first") else torch.randn(L, N, E)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * L, [True] + [False] * (L - 1)])
    lowest = torch.finfo(mask_type).min if mask_type.is_floating_point else 0
    if mask_type != torch.bool:
        hidden = torch.zeros(L, L, dtype=mask_type).masked_fill(hidden, lowest)
        padding = torch.zeros(N, L, dtype=mask_type).masked_fill(padding, lowest)
    with torch.autocast("cpu", dtype):
        out, _ = ours(x, x, x, attn_mask=hidden, key_padding_mask=padding)
        alone, _ = ours(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)
    assert out.dtype == dtype
    assert torch.equal(out, alone)
    assert out.isfinite().all()
    wide = x.double()
    if mask_type == torch.bool:
        hidden = torch.zeros(L, L).masked_fill(hidden, -1e30)
        padding = torch.zeros(N, L).masked_fill(padding, -1e30)
    masks = {"attn_mask": hidden.double(), "key_padding_mask": padding.double()}
    right, _ = exact(wide, wide, wide, **masks)
    rows = slice(1, None)  # row 0 of sequence 1 sees only hidden keys
    mine, truth = (t if config != "batch first" else t.transpose(0, 1) for t in (out, right))
    torch.testing.assert_close(mine[rows].double(), truth[rows], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mask_type", [torch.float32, torch.float64])
def test_a_row_of_lowest_numbers_is_an_average_not_nan(mask_type: torch.dtype) -> None:
    lowest = torch.finfo(mask_type).min  # float64's must not become float32's -inf
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    mask = torch.full((L, L), lowest, dtype=mask_type)
    for learned in (False, True):
        padding = torch.full((N, L), lowest, dtype=mask_type, requires_grad=learned)
        out, weights = module(x, x, x, attn_mask=mask, key_padding_mask=padding)
        torch.testing.assert_close(weights, torch.full((N, L, L), 1 / L))
        out.sum().backward()
        assert module.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_costs_no_work_forward_or_backward(kind: str) -> None:
    # TransformerEncoderLayer turns bool padding into float -inf before it calls its attention.
    length, real = 512, 100
    module = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(1, length, E)
    padding = torch.arange(length)[None] >= real
    if kind == "float":
        padding = torch.zeros(1, length).masked_fill(padding, -math.inf)
    rows, columns = torch.ops.attention_ext._block_sizes(length, length)
    visible = H * math.ceil(length / rows) * math.ceil(real / columns)
    assert visible < H * math.ceil(length / rows) * math.ceil(length / columns)
    torch.ops.attention_ext._visited_block_pairs()  # reading it sets it to zero
    out, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.ops.attention_ext._visited_block_pairs() == visible
    out.sum().backward()
    assert torch.ops.attention_ext._visited_block_pairs() == visible


@pytest.mark.parametrize("mask_type", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_masks_of_any_precision_are_taken(mask_type: torch.dtype) -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    mask = torch.randn(L, L).to(mask_type)
    padding = torch.randn(N, L).to(mask_type)
    out, _ = module(x, x, x, attn_mask=mask, key_padding_mask=padding)
    expected, _ = module(x, x, x, attn_mask=mask.float(), key_padding_mask=padding.float())
    torch.testing.assert_close(out, expected)


def test_masks_of_strides_zero_and_more_are_read_right() -> None:
    module = MultiheadAttention(E, H, dtype=torch.float64)
    x = torch.randn(L, N, E, dtype=torch.float64)
    per_head = torch.rand(N * H, L, L) < 0.4
    per_head[..., 0] = False
    rows = torch.rand(N * H, 1, L) < 0.4
    rows[..., 0] = False
    odd = torch.zeros(N * H, 2 * L, L, dtype=torch.bool)
    odd[:, ::2] = per_head
    for mask in (
        per_head[:1].expand(N * H, L, L),
        rows.expand(N * H, L, L),
        per_head[0],
        odd[:, ::2],
        per_head.transpose(0, 2).contiguous().transpose(0, 2),
        torch.zeros(1, 1, dtype=torch.bool).expand(L, L),
    ):
        expected = module(x, x, x, attn_mask=mask.contiguous())
        torch.testing.assert_close(
            module(x, x, x, attn_mask=mask), expected, rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "kind", ["none", "padding", "float padding", "bool", "float", "expanded", "causal appended"]
)
def test_nothing_as_large_as_all_scores_is_made(kind: str, need_weights: bool) -> None:
    heads, length = 8, 96
    appended = kind == "causal appended"
    module = MultiheadAttention(16, heads, batch_first=True, add_zero_attn=appended)
    x = torch.randn(N, length, 16)
    masks: dict[str, Any] = {
        "none": {},
        "padding": {"key_padding_mask": torch.zeros(N, length, dtype=torch.bool)},
        "float padding": {"key_padding_mask": torch.zeros(N, length)},
        "bool": {"attn_mask": torch.zeros(length, length, dtype=torch.bool)},
        "float": {"attn_mask": torch.zeros(length, length, requires_grad=True)},
        "expanded": {
            "attn_mask": torch.zeros(1, length, length, dtype=torch.bool).expand(N * heads, -1, -1)
        },
        "causal appended": {"is_causal": True},
    }[kind]
    with Watch() as seen:
        out, weights = module(x, x, x, need_weights=need_weights, **masks)
        loss = out.square().sum()
        if weights is not None:
            loss = loss + weights.square().sum()
        loss.backward()
    # Averaged weights and 2-D masks are allowed, in float32; all scores in bytes are not.
    one_matrix = length * (length + 1)
    assert seen.largest <= (4 * N * one_matrix if need_weights else 4 * one_matrix)
    assert seen.largest < N * heads * length * length


@pytest.mark.slow
def test_peak_memory_with_padding_and_mean_weights_is_far_below_all_scores() -> None:
    # 16 heads of 2048 x 2048 scores are 256 MiB in float32; the mean is 16 MiB.
    code = """
import torch
from attention_ext.modules import MultiheadAttention
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
module = MultiheadAttention(128, 16, batch_first=True)
x = torch.randn(1, 2048, 128)
small = x[:, :64]
module(small, small, small)[0].sum().backward()
start = peak()
module(x, x, x, key_padding_mask=torch.arange(2048)[None] > 1500)[0].sum().backward()
print((peak() - start) / 1024)
"""
    assert float(run_python(code).stdout) < 96


# -- compile, export, nested tensors --


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["batch first", slow("bias_kv and zero_attn"), slow("kdim and vdim")]
)
def test_compiles_without_a_graph_break(config: str) -> None:
    torch._dynamo.reset()
    module = MultiheadAttention(E, H, dropout=0.3, window=(3, 3), **CONFIGS[config])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves, qkv = make_inputs("three", CONFIGS[config], torch.float32)
    for attn in ("bool 2-D", "float 3-D"):
        masks = make_masks(attn, "bool", S, "three", torch.float32)
        results = []
        for call in (module, compiled):
            torch.manual_seed(4)
            out, weights = call(*qkv, **masks)
            wanted = [*module.parameters(), *leaves]
            results.append((out, weights, gradients(out, weights, wanted)))
        torch.testing.assert_close(results[1], results[0])


def test_exports() -> None:
    module = MultiheadAttention(E, H, batch_first=True).eval()
    x = torch.randn(N, L, E)
    padding = torch.tensor([[False] * L, [False] * (L - 1) + [True]])
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        module,
        (x, x, x, padding),
        dynamic_shapes=({1: length}, {1: length}, {1: length}, {1: length}, *[None] * 0),
    )
    longer = torch.randn(N, 9, E)
    padding = torch.zeros(N, 9, dtype=torch.bool)
    result = program.module()(longer, longer, longer, padding)
    torch.testing.assert_close(result, module(longer, longer, longer, padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_input_gives_what_each_sequence_gives_alone(layout: torch.layout) -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    sequences = [torch.randn(n, E) for n in (2, 5, 1, 4)]
    nested = torch.nested.nested_tensor(sequences, layout=layout, requires_grad=True)
    out, weights = module(nested, nested, nested, average_attn_weights=False)
    assert out.is_nested
    assert out.layout == layout
    total = nested + out  # a residual connection: torch must see the same shape
    grads = torch.autograd.grad(total.to_padded_tensor(0.0).sum(), list(module.parameters()))
    expected_grads = [torch.zeros_like(p) for p in module.parameters()]
    for n, sequence in enumerate(sequences):
        alone, alone_weights = module(sequence, sequence, sequence, average_attn_weights=False)
        torch.testing.assert_close(out.unbind()[n], alone)
        size = len(sequence)
        torch.testing.assert_close(weights[n, :, :size, :size], alone_weights)
        assert weights[n, :, size:].eq(0).all()
        assert weights[n, :, :, size:].eq(0).all()
        for into, grad in zip(
            expected_grads, torch.autograd.grad(alone.sum(), list(module.parameters())), strict=True
        ):
            into += grad
    torch.testing.assert_close(list(grads), expected_grads)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_batches_and_sequences(sizes: tuple[int, int, int]) -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    n, rows, keys = sizes
    q = torch.randn(n, rows, E, requires_grad=True)
    kv = torch.randn(n, keys, E)
    padding = torch.zeros(n, keys, dtype=torch.bool)
    out, weights = module(q, kv, kv, key_padding_mask=padding)
    assert out.shape == (n, rows, E)
    assert weights.shape == (n, rows, keys)
    if keys == 0:
        assert torch.equal(out, module.out_proj.bias.expand(n, rows, E))
    out.sum().backward()
    assert q.grad.eq(0).all()


# -- errors --


def shapes(*sizes: tuple[int, ...], **masks: Tensor) -> dict[str, Any]:
    inputs = [torch.randn(size) for size in sizes]
    return dict(zip(("query", "key", "value"), inputs, strict=True)) | masks


QKV = ((L, N, E), (S, N, E), (S, N, E))
FLAT = ((L, E), (S, E), (S, E))

WRONG_CALLS: dict[str, dict[str, Any]] = {
    "embedding": shapes((L, N, E + 1), (S, N, E), (S, N, E)),
    "key and value differ": shapes((L, N, E), (S, N, E), (S + 1, N, E)),
    "1-D query": shapes((E,), (S, E), (S, E)),
    "4-D query": shapes((1, L, N, E), (S, N, E), (S, N, E)),
    "batched query, unbatched key": shapes((L, N, E), (S, E), (S, E)),
    "unbatched query, batched key": shapes((L, E), (S, N, E), (S, N, E)),
    "2-D mask": shapes(*QKV, attn_mask=torch.zeros(L, S + 1)),
    "2-D mask transposed": shapes(*QKV, attn_mask=torch.zeros(S, L)),
    "mask per sequence": shapes(*QKV, attn_mask=torch.zeros(N, L, S)),
    "3-D mask": shapes(*QKV, attn_mask=torch.zeros(N * H, S, L)),
    "4-D mask": shapes(*QKV, attn_mask=torch.zeros(N, H, L, S)),
    "1-D mask": shapes(*QKV, attn_mask=torch.zeros(S)),
    "unbatched mask": shapes(*FLAT, attn_mask=torch.zeros(H + 1, L, S)),
    "padding batch": shapes(*QKV, key_padding_mask=torch.zeros(N + 1, S)),
    "padding length": shapes(*QKV, key_padding_mask=torch.zeros(N, S + 1)),
    "padding 3-D": shapes(*QKV, key_padding_mask=torch.zeros(N, 1, S)),
    "padding 2-D unbatched": shapes(*FLAT, key_padding_mask=torch.zeros(1, S)),
    "integer mask": shapes(*QKV, attn_mask=torch.ones(L, S, dtype=torch.int64)),
    "byte mask": shapes(*QKV, attn_mask=torch.ones(L, S, dtype=torch.uint8)),
    "integer padding": shapes(*QKV, key_padding_mask=torch.ones(N, S, dtype=torch.int64)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_wrong_calls_raise_torchs_error(call: dict[str, Any], training: bool) -> None:
    theirs, ours = (module.train(training) for module in pair(torch.float32))
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        theirs(**call)
    with pytest.raises(type(expected.value)) as raised:
        ours(**call)
    assert str(raised.value) == str(expected.value)
    x = torch.randn(L, N, E)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))  # and the next call works


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (-4, 2), (5, 2)])
def test_wrong_sizes_raise_torchs_error_at_construction(sizes: tuple[int, int]) -> None:
    with pytest.raises((AssertionError, ValueError)) as expected:
        nn.MultiheadAttention(*sizes)
    with pytest.raises(type(expected.value)) as raised:
        MultiheadAttention(*sizes)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads must be positive and divide num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive and divide num_heads"),
        ({"window": 3}, "window must be"),
        ({"window": (1, 2, 3)}, "window must be"),
        ({"window": (-1, 0)}, "window must be"),
        ({"window": (1.5, 0)}, "window must be"),
        ({"softcap": -1.0}, "softcap must be finite and not negative"),
        ({"softcap": math.inf}, "softcap must be finite and not negative"),
        ({"alibi": True, "add_zero_attn": True}, "alibi cannot be combined"),
        ({"alibi": True, "add_bias_kv": True}, "alibi cannot be combined"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(E, H, **options)


def test_different_batch_sizes_are_refused_with_both_shapes() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    for q, k in ((1, 4), (4, 1), (2, 3)):
        call = shapes((q, L, E), (k, S, E), (k, S, E))
        with pytest.raises(RuntimeError, match=rf"same batch size.*\[{q}, .*\[{k}, "):
            module(**call)


def test_half_of_bias_kv_is_refused() -> None:
    x = torch.randn(L, N, E)
    for name, message in (("bias_k", "bias_v is set but bias_k"), ("bias_v", "bias_k is set but")):
        module = MultiheadAttention(E, H, add_bias_kv=True)
        setattr(module, name, None)
        with pytest.raises(AssertionError, match=message):
            module(x, x, x)


def test_wrong_nested_calls_are_refused() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(2, E)], layout=torch.jagged)
    padded = torch.randn(1, 2, E)
    with pytest.raises(AssertionError, match="all nested or none"):
        module(nested, padded, padded)
    with pytest.raises(AssertionError, match="lengths say what is padding"):
        module(nested, nested, nested, attn_mask=torch.zeros(2, 2))
    module.batch_first = False
    with pytest.raises(AssertionError, match="needs batch_first=True"):
        module(nested, nested, nested)


def test_is_part_of_the_package() -> None:
    assert ae.MultiheadAttention is MultiheadAttention
