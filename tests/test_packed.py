"""Packed sequences: the numbers of one call for each, and the dropout of a padded batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
from cases import PACKED_CASES, PackedCase, borders_of, evaluate, params, raw_packed


@pytest.mark.parametrize("case", params(PACKED_CASES))
def test_packed_is_one_call_for_each_sequence(case: PackedCase) -> None:
    """Values and gradients equal those of ae.attention looped over the sequences."""
    args, kwargs = case.make(torch.float64, requires_grad=True)
    q, k, v, borders_q, borders_k = args
    got = evaluate(ae.varlen_attention, args, kwargs, return_lse=True)
    outs, lses = [q.new_zeros(0, q.size(1), v.size(2))], [q.new_zeros(q.size(1), 0)]
    for n in range(len(case.q_lens)):
        rows = slice(int(borders_q[n]), int(borders_q[n + 1]))
        keys = slice(int(borders_k[n]), int(borders_k[n + 1]))
        options = dict(kwargs)
        if "key_mask" in options:
            options["key_mask"] = options["key_mask"][keys]
        if isinstance(options.get("query_offset"), Tensor):
            options["query_offset"] = int(options["query_offset"][n])
        if case.dropout_p > 0:
            options["rng_state"] = options["rng_state"].clone()
            options["rng_state"][3] = n * q.size(1)
        one = (q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
        out, lse = ae.attention(*one, **options, return_lse=True)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    torch.testing.assert_close(got["out"], torch.cat(outs))
    torch.testing.assert_close(got["lse"], torch.cat(lses, -1))
    want = evaluate(reference.varlen_attention, args, kwargs, return_lse=True)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


def test_shapes_and_memory_of_the_results() -> None:
    args, kwargs = PACKED_CASES[0].make(torch.bfloat16)
    out, lse = ae.varlen_attention(*args, **kwargs, return_lse=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((135, 2, 16), torch.bfloat16, True)
    assert (lse.shape, lse.dtype) == ((2, 135), torch.float32)
    assert isinstance(ae.varlen_attention(*args, **kwargs), Tensor)


def test_raw_op_takes_the_packed_form() -> None:
    args, kwargs = PACKED_CASES[-1].make(torch.float32)
    raw_args, raw_kwargs = raw_packed(args, kwargs)
    out, lse, residual, _ = torch.ops.attention_ext.attention(*raw_args, **raw_kwargs)
    want, want_lse = ae.varlen_attention(*args, **kwargs, return_lse=True)
    assert torch.equal(out[0].transpose(0, 1), want)
    assert torch.equal(lse[0], want_lse)
    assert residual.shape == lse.shape


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_packed_and_padded_batches_agree(dropout_p: float) -> None:
    """Numbers and dropout: position and sequence decide, not where they lie in memory."""
    lens = (97, 40, 1)
    padded = torch.randn(3, 3, 2, 97, 8, dtype=torch.float64)  # q, k, v of (B, H, L, E)
    seen = torch.arange(97) < torch.tensor(lens)[:, None]
    state = torch.tensor([5, 6, 0, 0, 0, 0])
    options = {"dropout_p": dropout_p, "rng_state": state, "is_causal": True}
    want = ae.attention(*padded.unbind(0), key_mask=seen, **options)
    packed = [x.transpose(1, 2)[seen] for x in padded.unbind(0)]
    borders = borders_of(lens)
    got = ae.varlen_attention(*packed, borders, borders, **options)
    torch.testing.assert_close(got, want.transpose(1, 2)[seen])


def test_sequences_without_keys_are_dead_and_feel_no_neighbour() -> None:
    borders_q, borders_k = borders_of((3, 4, 5)), borders_of((6, 0, 7))
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (12, 13, 13))
    k[:6] = v[:6] = math.nan
    q.requires_grad_()
    out, lse = ae.varlen_attention(q, k, v, borders_q, borders_k, return_lse=True)
    assert out[:3].isnan().all()
    assert (out[3:7] == 0).all()
    assert (lse[:, 3:7] == -math.inf).all()
    assert out[7:].isfinite().all()
    (d_q,) = torch.autograd.grad(out[3:].sum(), q)
    assert (d_q[3:7] == 0).all()
    assert d_q[7:].isfinite().all()


def test_one_dead_sequence_keeps_its_sink() -> None:
    borders_q, borders_k = borders_of((3, 4)), borders_of((0, 6))
    q, k, v = (torch.randn(n, 2, 8) for n in (7, 6, 6))
    sinks = torch.tensor([0.5, -2.0])
    _, lse = ae.varlen_attention(q, k, v, borders_q, borders_k, sinks=sinks, return_lse=True)
    assert torch.equal(lse[:, :3], sinks[:, None].expand(2, 3))


@pytest.mark.parametrize("name", ["query", "key_mask"])
def test_wrong_number_of_dimensions_is_refused(name: str) -> None:
    x, borders = torch.randn(4, 2, 8), borders_of((4,))
    with pytest.raises(RuntimeError, match=f"varlen_attention: {name} must have"):
        if name == "query":
            ae.varlen_attention(x[None], x, x, borders, borders)
        else:
            ae.varlen_attention(x, x, x, borders, borders, key_mask=torch.ones(1, 4).bool())


def _jagged(lens: tuple[int, ...], size: int = 8, heads: int = 2) -> Tensor:
    parts = [torch.randn(n, heads, size) for n in lens]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def test_jagged_tensors_are_packed_sequences() -> None:
    q, k = _jagged((5, 0, 70), heads=4), _jagged((9, 3, 100))
    v = torch.nested.nested_tensor_from_jagged(torch.randn(2, 112, 5), k.offsets(), jagged_dim=2)
    out, lse = ae.attention(q, k, v, is_causal=True, window=(20, None), return_lse=True)
    assert out.is_nested
    for one, one_lse, *qkv in zip(
        out.unbind(), lse.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True
    ):
        want, want_lse = reference.attention(
            *qkv, is_causal=True, window=(20, None), return_lse=True
        )
        torch.testing.assert_close(one, want)
        torch.testing.assert_close(one_lse, want_lse)
    assert out.shape[2] == q.shape[2]  # the same ragged dimension
    sdpa = ae.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(sdpa.values(), ae.attention(q, k, v, is_causal=True).values())


def test_jagged_tensors_with_holes() -> None:
    start, length = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4])
    whole = torch.randn(3, 9, 2, 8)
    holes = torch.nested.narrow(whole, 1, start, length, layout=torch.jagged).transpose(1, 2)
    out = ae.attention(holes, holes, holes)
    for n, one in enumerate(out.unbind()):
        part = whole[n, start[n] : start[n] + length[n]].transpose(0, 1)
        torch.testing.assert_close(one, reference.attention(part, part, part))


def test_what_nested_tensors_cannot_do_is_refused() -> None:
    q, dense = _jagged((5, 7)), torch.randn(2, 2, 5, 8)
    with pytest.raises(RuntimeError, match="must be nested together, got a dense key"):
        ae.attention(q, dense, dense)
    with pytest.raises(RuntimeError, match="return_weights must be False for nested"):
        ae.attention(q, q, q, return_weights=True)
    with pytest.raises(RuntimeError, match="must have the same lengths"):
        ae.attention(q, q, _jagged((7, 5)))
    with pytest.raises(RuntimeError, match="must be nested"):
        ae.attention(q, q, q, key_mask=torch.ones(2, 7, dtype=torch.bool))
    # One of the packed total's size would not be a mask of any sequence.
    for size in (5, 12):
        for name, dtype in (("attn_mask", torch.bool), ("attn_bias", torch.float32)):
            with pytest.raises(RuntimeError, match=f"{name} must be None beside nested tensors"):
                ae.attention(q, q, q, **{name: torch.ones(size, size, dtype=dtype)})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="jagged layout and the dimensions"):
        ae.attention(*[q.transpose(1, 2)] * 3)
    with pytest.raises(RuntimeError):
        ae.attention(q, q, q, torch.ones(7, 7, dtype=torch.bool))
    torch.testing.assert_close(ae.attention(q, q, q).values(), ae.attention(q, q, q).values())


def test_every_sequence_has_its_own_slopes() -> None:
    """Slopes (sequences, H), in packed and in jagged form, are those of each sequence alone."""
    torch.manual_seed(0)
    borders = torch.tensor([0, 5, 5, 120])
    slopes = torch.tensor([[0.9, 0.1], [0.3, 0.3], [0.2, 0.5]], dtype=torch.float64)
    q, k, v = (torch.randn(120, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = ae.varlen_attention(q, k, v, borders, borders, alibi_slopes=slopes)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    parts = []
    for n in range(3):
        rows = slice(int(borders[n]), int(borders[n + 1]))
        one = [t[rows].transpose(0, 1) for t in (q, k, v)]
        parts.append(ae.attention(*one, alibi_slopes=slopes[n]).transpose(0, 1))
    alone = torch.cat(parts)
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(
        grads, torch.autograd.grad(alone.square().sum(), (q, k, v)), rtol=1e-10, atol=1e-10
    )
    right = reference.varlen_attention(q, k, v, borders, borders, alibi_slopes=slopes)
    torch.testing.assert_close(out, right)
    nested = [
        torch.nested.nested_tensor_from_jagged(t.detach(), offsets=borders).transpose(1, 2)
        for t in (q, k, v)
    ]
    jagged = ae.attention(*nested, alibi_slopes=slopes).transpose(1, 2).values()
    torch.testing.assert_close(jagged, out.detach())
