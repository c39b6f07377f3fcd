"""Dropout: the mask is the reference's, wherever and however it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import DTYPES, Case, case_named, evaluate


def _state(*numbers: int) -> Tensor:
    return torch.tensor([*numbers, *[0] * (6 - len(numbers))])


def _kept(
    state: Tensor, batch: int, heads: int, rows: int, keys: int, p: float, dtype: torch.dtype
) -> Tensor:
    """Which pairs the op keeps: equal scores, so that every kept weight is the same number."""
    zeros = torch.zeros(batch, heads, max(rows, keys), 1, dtype=dtype)
    query, key = zeros[:, :, :rows], zeros[:, :, :keys]
    weights = ae.attention(query, key, key, dropout_p=p, rng_state=state, return_weights=True)[1]
    rescaled = reference.dropout_rescale(p) / keys
    torch.testing.assert_close(weights.amax().double().item(), rescaled, rtol=1e-2, atol=0)
    assert ((weights == 0) | (weights == weights.amax())).all()
    return weights != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("rows", [1, 3, 97])
@pytest.mark.parametrize("keys", [17, 63, 96, 100, 193, 1100])
def test_mask_is_the_references(keys: int, rows: int, p: float) -> None:
    state = _state(-7, 2**45 + 3)
    got = _kept(state, 2, 3, rows, keys, p, torch.float32)
    assert torch.equal(got, reference.dropout_mask(state, (2,), 3, rows, keys, p))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    got = _kept(_state(5), 1, 2, 40, 130, 0.25, dtype)
    assert torch.equal(got, reference.dropout_mask(_state(5), (1,), 2, 40, 130, 0.25))


@pytest.mark.parametrize("rows", [1, 50])
def test_output_drops_what_the_weights_drop(rows: int) -> None:
    """With the identity for values, the output is the dropped weights, in every kernel."""
    (q, k, _), _ = Case("identity", rows, 130, 16).make(torch.float32)
    v = torch.eye(130).expand(2, 2, 130, 130)
    state = _state(99, 1)
    out, weights = ae.attention(q, k, v, dropout_p=0.4, rng_state=state, return_weights=True)
    torch.testing.assert_close(out, weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(out != 0, reference.dropout_mask(state, (2,), 2, rows, 130, 0.4))


def test_state_places_a_shard_inside_the_whole() -> None:
    (q, k, v), _ = Case("shard", 60, 100, 8, batch=(2,), heads=6).make(torch.float32)
    options: dict[str, Any] = {"dropout_p": 0.5, "return_weights": True}
    whole = ae.attention(q, k, v, **options, rng_state=_state(3, 4))[1] != 0
    shard = ae.attention(
        q[:, 2:5, 7:40],
        k[:, 2:5, 13:],
        v[:, 2:5, 13:],
        **options,
        rng_state=_state(3, 4, 6, 2, 7, 13),
    )[1]
    assert torch.equal(shard != 0, whole[:, 2:5, 7:40, 13:])


def test_gradients_use_the_forwards_mask() -> None:
    """Values get the dropped, rescaled weights' transpose times the incoming gradient."""
    (q, k, v), _ = Case("gradient", 97, 130, 8).make(torch.float64)
    v.requires_grad_()
    out, weights = ae.attention(q, k, v, dropout_p=0.3, rng_state=_state(8), return_weights=True)
    grad = torch.randn_like(out)
    (d_v,) = torch.autograd.grad(out, v, grad)
    torch.testing.assert_close(d_v, weights.detach().transpose(-1, -2) @ grad)


@pytest.mark.parametrize("keys", [63, 65, 130])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_match_the_reference(keys: int, is_causal: bool) -> None:
    args, _ = Case("gradient", 100, keys, 7).make(torch.float64, requires_grad=True)
    kwargs = {"dropout_p": 0.5, "rng_state": _state(1, 2), "is_causal": is_causal}
    got, want = (evaluate(f, args, kwargs) for f in (ae.attention, reference.attention))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


def test_second_derivatives_use_the_forwards_mask() -> None:
    args, _ = Case("second", 9, 21, 3, batch=(1,)).make(torch.float64, requires_grad=True)

    def second(function: Any) -> tuple[Tensor, ...]:
        out = function(*args, dropout_p=0.5, rng_state=_state(4))
        first = torch.autograd.grad(out.sin().sum(), args, create_graph=True)
        return torch.autograd.grad(sum((x * x).sum() for x in first), args)

    for x, y in zip(second(ae.attention), second(reference.attention), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("p", [1 / 3, 0.1, 1e-5, 1 - 1e-5, 0.5 / 65536, 1.5 / 65536])
def test_probability_is_rounded_to_65536ths(p: float) -> None:
    """The rescaling uses the rounded probability; half a step rounds to even."""
    (q, k, v), _ = Case("rounded", 5, 40, 8).make(torch.float64)
    weights = ae.attention(q, k, v, return_weights=True)[1]
    dropped = ae.attention(q, k, v, dropout_p=p, rng_state=_state(2), return_weights=True)[1]
    kept = reference.dropout_mask(_state(2), (2,), 2, 5, 40, p)
    torch.testing.assert_close(
        dropped, torch.where(kept, weights * reference.dropout_rescale(p), 0)
    )


def test_zero_probability_costs_and_draws_nothing() -> None:
    args, kwargs = case_named("odd").make(torch.float32)
    before = torch.get_rng_state()
    out = ae.attention(*args, **kwargs, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out, ae.attention(*args, **kwargs))
    assert torch.equal(out, ae.attention(*args, **kwargs, dropout_p=0.0, rng_state=_state(1)))


def test_probability_one_gives_zeros_that_require_grad() -> None:
    args, _ = Case("one", 40, 100, 8).make(torch.float32, requires_grad=True)
    out, lse, weights = ae.attention(*args, dropout_p=1.0, return_lse=True, return_weights=True)
    assert out.requires_grad
    assert (out == 0).all()
    assert (weights == 0).all()
    torch.testing.assert_close(lse, ae.attention(*args, return_lse=True)[1])
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), args))


def test_seed_of_torch_decides() -> None:
    args, _ = case_named("odd").make(torch.float32)
    torch.manual_seed(3)
    first, second = (ae.attention(*args, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = ae.attention(*args, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(ae.scaled_dot_product_attention(*args, dropout_p=0.5), first)
    torch.manual_seed(3)
    torch.testing.assert_close(reference.attention(*args, dropout_p=0.5), first)


def test_state_fits_any_call_and_repeats() -> None:
    torch.manual_seed(4)
    state = ae.make_rng_state()
    assert (state.shape, state.dtype) == ((6,), torch.int64)
    assert (state[2:] == 0).all()
    assert (state[:2] > 0).all()
    assert not torch.equal(state, ae.make_rng_state("cpu"))
    for name in ("odd", "decode", "unbatched", "two_batch_dims"):
        args, _ = case_named(name).make(torch.float32)
        a, b = (ae.attention(*args, dropout_p=0.5, rng_state=state) for _ in range(2))
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_draw(reentrant: bool) -> None:
    args, _ = case_named("odd").make(torch.float32, requires_grad=True)

    def call(*tensors: Tensor) -> Tensor:
        return ae.attention(*tensors, dropout_p=0.5)

    torch.manual_seed(6)
    want = torch.autograd.grad(call(*args).sin().sum(), args)
    torch.manual_seed(6)
    out = torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=reentrant)
    for x in args:
        x.grad = None
    out.sin().sum().backward()
    for x, y in zip(args, want, strict=True):
        torch.testing.assert_close(x.grad, y)


def test_share_of_dropped_pairs() -> None:
    kept = _kept(_state(123456789, 42), 2, 4, 128, 512, 0.3, torch.float32).double()
    assert abs(float(kept.mean()) - 0.7) < 0.004  # six standard deviations
    for dim in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):  # no key, row or head is treated differently
        means = kept.mean(dim)
        spread = (0.21 / (kept.numel() / means.numel())) ** 0.5
        assert float((means - 0.7).abs().max()) < 6 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_a_single_visible_key_takes_no_gradient_of_scores(dtype: torch.dtype, p: float) -> None:
    """Its probability is 1 whatever the score: no rounding of the rescaled output may be left.

    What is left is the rounding of that rounding, which the operator keeps in the same dtype.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 100, 64).to(dtype).requires_grad_() for _ in range(3))
    out = ae.attention(
        q, k, v, torch.eye(100, dtype=torch.bool), dropout_p=p, rng_state=ae.make_rng_state()
    )
    grads = torch.autograd.grad(out, (q, k), torch.randn(1, 4, 100, 64).to(dtype))
    limit = 4 * torch.finfo(dtype).eps ** 2 / (1 - p)
    assert max(float(grad.abs().max()) for grad in grads) < limit
