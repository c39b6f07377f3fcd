"""One wrong call for every check sentence in the sources, for test_errors.py.

Keys are the first words of each sentence, exactly as the source has them. `python wrong_calls.py`
makes every call, each followed by a right one, and prints a line of JSON for each; test_errors.py
runs that in a process of its own, so that a crash is seen as one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attention_ext  # noqa: F401  (loads the ops)
from attention_ext import reference

ops: Any = torch.ops.attention_ext

B, H, KV, L, S, E, EV = 2, 4, 2, 3, 5, 8, 6


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def attention(**changes: Any) -> Any:
    """attention with right arguments, but for the changes."""
    tensors = {"query": normal(B, H, L, E), "key": normal(B, KV, S, E)}
    return ops.attention(**{**tensors, "value": normal(B, KV, S, EV), **changes})


def packed(**changes: Any) -> Any:
    """The same for packed sequences of 1 and 2 queries, 2 and 3 keys."""
    arguments = {
        "query": normal(1, H, L, E),
        "key": normal(1, KV, S, E),
        "value": normal(1, KV, S, EV),
        "cu_seqlens_q": torch.tensor([0, 1, 3]),
        "cu_seqlens_k": torch.tensor([0, 2, 5], dtype=torch.int64),
    }
    return ops.attention(**{**arguments, **changes})


NO_OPTIONS = {
    "attn_mask": None, "attn_bias": None, "key_mask": None, "sinks": None, "alibi_slopes": None,
    "query_offsets": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "rng_state": None,
}  # fmt: skip


def backward(**changes: Any) -> Any:
    arguments = {
        "grad_output": normal(B, H, L, EV),
        "grad_logsumexp": normal(B, H, L),
        "query": normal(B, H, L, E),
        "key": normal(B, KV, S, E),
        "value": normal(B, KV, S, EV),
        **NO_OPTIONS,
        "output": normal(B, H, L, EV),
        "logsumexp": normal(B, H, L),
        "logsumexp_residual": normal(B, H, L),
        "output_residual": None,
        "wanted": [True, True, True, False, False],
    }
    return ops.attention_backward(**{**arguments, **changes})


def weights(**changes: Any) -> Any:
    arguments = {
        "query": normal(B, H, L, E),
        "key": normal(B, KV, S, E),
        **NO_OPTIONS,
        "logsumexp": normal(B, H, L),
        "logsumexp_residual": normal(B, H, L),
        "average_heads": False,
    }
    return ops.attention_weights(**{**arguments, **changes})


def weights_backward(**changes: Any) -> Any:
    arguments = {
        "grad_weights": normal(B, H, L, S),
        "query": normal(B, H, L, E),
        "key": normal(B, KV, S, E),
        **NO_OPTIONS,
        "logsumexp": normal(B, H, L),
        "logsumexp_residual": normal(B, H, L),
        "wanted": [True, True, False, False],
        "average_heads": False,
    }
    return ops.attention_weights_backward(**{**arguments, **changes})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sparse(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype).to_sparse()


def vmapped(**changes: Any) -> Any:
    """attention under vmap over two elements, for the changes that have a leading dimension 2."""
    return torch.vmap(lambda tensors: attention(**tensors))(changes)


BOOL, INT, LONG, HALF = torch.bool, torch.int32, torch.int64, torch.float16
STATE = torch.tensor([1, 2, 0, 0, 0, 0])

WRONG_CALLS: dict[str, Callable[[], object]] = {
    # query
    "query must be a dense strided tensor, got layout ": lambda: attention(
        query=sparse(B, H, L, E)
    ),
    "query must be float64, float32, bfloat16 or float16, got ": lambda: attention(
        query=normal(B, H, L, E, dtype=LONG)
    ),
    "query must have at least 3 dimensions (heads, length, size), got ": lambda: attention(
        query=normal(L, E), key=normal(S, E), value=normal(S, EV)
    ),
    # key
    "key must be a dense strided tensor, got layout ": lambda: attention(key=sparse(B, KV, S, E)),
    "key must be on the query's device ": lambda: attention(key=meta(B, KV, S, E)),
    "key must have the query's dtype ": lambda: attention(key=normal(B, KV, S, E, dtype=HALF)),
    "key must have the query's number of dimensions, got ": lambda: attention(key=normal(KV, S, E)),
    "key must have the query's batch dimensions, got ": lambda: attention(key=normal(3, KV, S, E)),
    "key must have the query's size E, got ": lambda: attention(key=normal(B, KV, S, E + 1)),
    "key has no heads, but the query has: ": lambda: attention(
        key=normal(B, 0, S, E), value=normal(B, 0, S, EV)
    ),
    "query's heads must be a multiple of the key's heads, got ": lambda: attention(
        key=normal(B, 3, S, E), value=normal(B, 3, S, EV)
    ),
    # value
    "value must be a dense strided tensor, got layout ": lambda: attention(
        value=sparse(B, KV, S, EV)
    ),
    "value must be on the query's device ": lambda: attention(value=meta(B, KV, S, EV)),
    "value must have the query's dtype ": lambda: attention(
        value=normal(B, KV, S, EV, dtype=torch.float64)
    ),
    "value must have the query's number of dimensions, got ": lambda: attention(
        value=normal(KV, S, EV)
    ),
    "value must have the query's batch dimensions, got ": lambda: attention(
        value=normal(1, KV, S, EV)
    ),
    "value must have the key's number of heads, got ": lambda: attention(value=normal(B, 1, S, EV)),
    "value must have the key's length S, got ": lambda: attention(value=normal(B, KV, S + 1, EV)),
    # attn_mask
    "attn_mask must be a dense strided tensor, got layout ": lambda: attention(
        attn_mask=sparse(L, S, dtype=BOOL)
    ),
    "attn_mask must be on the query's device ": lambda: attention(attn_mask=meta(L, S, dtype=BOOL)),
    "attn_mask must be bool, True where a key takes part (a float mask is attn_bias), got ": (
        lambda: attention(attn_mask=normal(L, S))
    ),
    "attn_mask with 3 dimensions could mean (B, L, S) or (H, L, S): unsqueeze(1) or unsqueeze(0) "
    "it to the query's number of dimensions, got ": lambda: attention(
        attn_mask=normal(B, L, S, dtype=BOOL)
    ),
    "attn_mask must be (L, S) or have the query's number of dimensions, got ": lambda: attention(
        attn_mask=normal(S, dtype=BOOL)
    ),
    "attn_mask must have each dimension full or 1, got ": lambda: attention(
        attn_mask=normal(B, 2, L, S, dtype=BOOL)
    ),
    # attn_bias
    "attn_bias must be a dense strided tensor, got layout ": lambda: attention(
        attn_bias=sparse(L, S)
    ),
    "attn_bias must be on the query's device ": lambda: attention(attn_bias=meta(L, S)),
    "attn_bias must be ": lambda: attention(attn_bias=normal(L, S, dtype=BOOL)),
    "attn_bias with 3 dimensions could mean (B, L, S) or (H, L, S): unsqueeze(1) or unsqueeze(0) "
    "it to the query's number of dimensions, got ": lambda: attention(attn_bias=normal(H, L, S)),
    "attn_bias must be (L, S) or have the query's number of dimensions, got ": lambda: attention(
        attn_bias=normal(1, B, H, L, S)
    ),
    "attn_bias must have each dimension full or 1, got ": lambda: attention(attn_bias=normal(S, L)),
    # key_mask
    "key_mask must be a dense strided tensor, got layout ": lambda: attention(
        key_mask=sparse(B, S, dtype=BOOL)
    ),
    "key_mask must be on the query's device ": lambda: attention(key_mask=meta(B, S, dtype=BOOL)),
    "key_mask must be bool or ": lambda: attention(key_mask=normal(B, S, dtype=INT)),
    "key_mask must have the query's batch dimensions and S, ": lambda: attention(
        key_mask=normal(S, dtype=BOOL)
    ),
    "key_mask is a constant and must not require grad (a learned bias is attn_bias), got a tensor "
    "that does": lambda: attention(key_mask=normal(B, S).requires_grad_()),
    # sinks
    "sinks must be a dense strided tensor, got layout ": lambda: attention(sinks=sparse(H)),
    "sinks must be on the query's device ": lambda: attention(sinks=meta(H)),
    "sinks must be ": lambda: attention(sinks=normal(H, dtype=HALF)),
    "sinks must have one value a query head, (": lambda: attention(sinks=normal(KV)),
    # alibi_slopes
    "alibi_slopes must be a dense strided tensor, got layout ": lambda: attention(
        alibi_slopes=sparse(H)
    ),
    "alibi_slopes must be on the query's device ": lambda: attention(alibi_slopes=meta(H)),
    "alibi_slopes must be ": lambda: attention(alibi_slopes=normal(H, dtype=LONG)),
    "alibi_slopes must be (H) or have the query's batch dimensions and H, ": lambda: attention(
        alibi_slopes=normal(1, H)
    ),
    "alibi_slopes must be (H) or have one row a packed sequence, (": lambda: packed(
        alibi_slopes=normal(1, H)
    ),
    "alibi_slopes are constants and must not require grad (a learned bias is attn_bias), got a "
    "tensor that does": lambda: attention(alibi_slopes=normal(H).requires_grad_()),
    # query_offset and query_offsets
    "query_offset must lie within 2^61 of 0, got ": lambda: attention(query_offset=2**62),
    "query_offset must stay 0 when query_offsets are given, got ": lambda: attention(
        query_offset=1, query_offsets=torch.zeros(B, dtype=LONG)
    ),
    "query_offsets must be a dense strided tensor, got layout ": lambda: attention(
        query_offsets=sparse(B, dtype=LONG)
    ),
    "query_offsets must be on the query's device ": lambda: attention(
        query_offsets=meta(B, dtype=LONG)
    ),
    "query_offsets must be int64 or int32, got ": lambda: attention(query_offsets=normal(B)),
    "query_offsets must have the query's batch dimensions ": lambda: attention(
        query_offsets=torch.zeros(B, 1, dtype=LONG)
    ),
    "query_offsets must have one value a packed sequence, got ": lambda: packed(
        query_offsets=torch.zeros(1, dtype=LONG)
    ),
    "query_offsets must lie within 2^61 of 0, got ": lambda: attention(
        query_offsets=torch.tensor([0, -(2**63)])
    ),
    # cu_seqlens
    "cu_seqlens_q must be given when cu_seqlens_k is, got None": lambda: packed(cu_seqlens_q=None),
    "cu_seqlens_k must be given when cu_seqlens_q is, got None": lambda: packed(cu_seqlens_k=None),
    "cu_seqlens_q must be a dense strided tensor, got layout ": lambda: packed(
        cu_seqlens_q=sparse(3, dtype=LONG)
    ),
    "cu_seqlens_q must be on the query's device ": lambda: packed(cu_seqlens_q=meta(3, dtype=LONG)),
    "cu_seqlens_q must be int64 or int32, got ": lambda: packed(cu_seqlens_q=normal(3)),
    "cu_seqlens_q must have one dimension and at least one value, got ": lambda: packed(
        cu_seqlens_q=torch.zeros(0, dtype=LONG)
    ),
    "cu_seqlens_k must be a dense strided tensor, got layout ": lambda: packed(
        cu_seqlens_k=sparse(3, dtype=LONG)
    ),
    "cu_seqlens_k must be on the query's device ": lambda: packed(cu_seqlens_k=meta(3, dtype=LONG)),
    "cu_seqlens_k must be int64 or int32, got ": lambda: packed(
        cu_seqlens_k=torch.tensor([0, 2, 5], dtype=torch.int16)
    ),
    "cu_seqlens_k must have cu_seqlens_q's shape ": lambda: packed(
        cu_seqlens_k=torch.tensor([0, 2, 4, 5])
    ),
    "cu_seqlens_q must start at 0, got ": lambda: packed(cu_seqlens_q=torch.tensor([1, 2, 3])),
    "cu_seqlens_k must start at 0, got ": lambda: packed(cu_seqlens_k=torch.tensor([-1, 2, 5])),
    "cu_seqlens_q must never fall, got ": lambda: packed(cu_seqlens_q=torch.tensor([0, 4, 3])),
    "cu_seqlens_k must never fall, got ": lambda: packed(
        cu_seqlens_k=torch.tensor([0, 7, 5], dtype=INT)
    ),
    "cu_seqlens_q must end at the query's length ": lambda: packed(
        cu_seqlens_q=torch.tensor([0, 1, 2])
    ),
    "cu_seqlens_k must end at the key's length ": lambda: packed(
        cu_seqlens_k=torch.tensor([0, 2, 2**40])
    ),
    "query must be (1, H, T, E) with cu_seqlens (packed sequences), got ": lambda: packed(
        query=normal(B, H, L, E), key=normal(B, KV, S, E), value=normal(B, KV, S, EV)
    ),
    "attn_mask does not go with cu_seqlens: packed sequences take key_mask, window and is_causal, "
    "got a mask of ": lambda: packed(attn_mask=normal(L, S, dtype=BOOL)),
    "attn_bias does not go with cu_seqlens: packed sequences take alibi_slopes, got a bias of ": (
        lambda: packed(attn_bias=normal(L, S))
    ),
    "cu_seqlens do not go with weights: packed sequences have no dense weights, got cu_seqlens "
    "beside a query of ": lambda: weights(
        cu_seqlens_q=torch.tensor([0, L]), cu_seqlens_k=torch.tensor([0, S])
    ),
    # dropout
    "dropout_p must lie between 0 and 1, got ": lambda: attention(
        dropout_p=float("nan"), rng_state=STATE
    ),
    "rng_state must be given when dropout_p > 0 (attention_ext.make_rng_state makes one), got None "
    "with dropout_p ": lambda: attention(dropout_p=0.5),
    "rng_state must be a dense strided tensor, got layout ": lambda: attention(
        rng_state=sparse(6, dtype=LONG)
    ),
    "rng_state must be on the query's device ": lambda: attention(
        dropout_p=0.5, rng_state=meta(6, dtype=LONG)
    ),
    "rng_state must be int64, got ": lambda: attention(dropout_p=0.5, rng_state=STATE.int()),
    "rng_state must be (6): seed, offset, heads_total, first head, row and key, got ": (
        lambda: attention(dropout_p=0.5, rng_state=STATE[:2])
    ),
    # scalars
    "scale must be finite, or None for 1/sqrt(E), got ": lambda: attention(scale=float("inf")),
    "softcap must be finite and at least 0 (0: none), got ": lambda: attention(softcap=-1.0),
    "window_left must be at least 0, or None for no limit, got ": lambda: attention(window_left=-1),
    "window_right must be at least 0, or None for no limit, got ": lambda: attention(
        window_right=-5, is_causal=True
    ),
    # the backward op
    "output must be a dense strided tensor, got layout ": lambda: backward(
        output=sparse(B, H, L, EV)
    ),
    "output must be on the query's device ": lambda: backward(output=meta(B, H, L, EV)),
    "output must have the query's dtype ": lambda: backward(output=normal(B, H, L, EV, dtype=HALF)),
    "output must have the shape ": lambda: backward(output=normal(B, H, L, E)),
    "logsumexp must be a dense strided tensor, got layout ": lambda: backward(
        logsumexp=sparse(B, H, L)
    ),
    "logsumexp must be on the query's device ": lambda: backward(logsumexp=meta(B, H, L)),
    "logsumexp must be ": lambda: weights(logsumexp=normal(B, H, L, dtype=torch.float64)),
    "logsumexp must have the shape ": lambda: weights_backward(logsumexp=normal(B, H, L, 1)),
    "logsumexp_residual must be a dense strided tensor, got layout ": lambda: weights(
        logsumexp_residual=sparse(B, H, L)
    ),
    "logsumexp_residual must be on the query's device ": lambda: backward(
        logsumexp_residual=meta(B, H, L)
    ),
    "logsumexp_residual must be ": lambda: backward(logsumexp_residual=normal(B, H, L, dtype=HALF)),
    "logsumexp_residual must have the shape ": lambda: backward(logsumexp_residual=normal(B, L, H)),
    "output_residual must be a dense strided tensor, got layout ": lambda: backward(
        output_residual=sparse(B, H, L, EV)
    ),
    "output_residual must be on the query's device ": lambda: backward(
        output_residual=meta(B, H, L, EV)
    ),
    "output_residual must have the query's dtype ": lambda: backward(
        output_residual=normal(B, H, L, EV, dtype=HALF)
    ),
    "output_residual must have the output's shape ": lambda: backward(
        output_residual=normal(B, H, L, E)
    ),
    "grad_output must be a dense strided tensor, got layout ": lambda: backward(
        grad_output=sparse(B, H, L, EV)
    ),
    "grad_output must be on the query's device ": lambda: backward(grad_output=meta(B, H, L, EV)),
    "grad_output must have the query's dtype ": lambda: backward(
        grad_output=normal(B, H, L, EV, dtype=torch.bfloat16)
    ),
    "grad_output must have the output's shape ": lambda: backward(grad_output=normal(B, H, L, 1)),
    "grad_logsumexp must be a dense strided tensor, got layout ": lambda: backward(
        grad_logsumexp=sparse(B, H, L)
    ),
    "grad_logsumexp must be on the query's device ": lambda: backward(grad_logsumexp=meta(B, H, L)),
    "grad_logsumexp must be ": lambda: backward(grad_logsumexp=normal(B, H, L, dtype=HALF)),
    "grad_logsumexp must have logsumexp's shape ": lambda: backward(grad_logsumexp=normal(H, L)),
    "wanted asks for the gradient of attn_bias, which must be given, got None": lambda: backward(
        wanted=[True, True, True, True, False]
    ),
    "wanted asks for the gradient of sinks, which must be given, got None": lambda: backward(
        wanted=[False, False, False, False, True]
    ),
    # the weights' backward op
    "grad_weights must be a dense strided tensor, got layout ": lambda: weights_backward(
        grad_weights=sparse(B, H, L, S)
    ),
    "grad_weights must be on the query's device ": lambda: weights_backward(
        grad_weights=meta(B, H, L, S)
    ),
    "grad_weights must have the query's dtype ": lambda: weights_backward(
        grad_weights=normal(B, H, L, S, dtype=HALF)
    ),
    "grad_weights must have the weights' shape ": lambda: weights_backward(average_heads=True),
    "wanted asks for the weights' gradient of attn_bias, which must be given, got None": (
        lambda: weights_backward(wanted=[True, True, True, False])
    ),
    "wanted asks for the weights' gradient of sinks, which must be given, got None": (
        lambda: weights_backward(wanted=[True, True, False, True])
    ),
    # under vmap
    "query under vmap must have at least 3 dimensions (heads, length, size), got ": lambda: vmapped(
        query=normal(2, L, E), key=normal(2, S, E), value=normal(2, S, EV)
    ),
    "attn_mask under vmap must be (L, S) or have the query's number of dimensions, ": (
        lambda: vmapped(attn_mask=normal(2, S, dtype=BOOL))
    ),
    "attn_bias under vmap must be (L, S) or have the query's number of dimensions, ": (
        lambda: vmapped(attn_bias=normal(2, H, L, S))
    ),
    "sinks under vmap must have one dimension, got ": lambda: vmapped(sinks=normal(2)),
    "alibi_slopes under vmap must be (H) or have the query's batch dimensions and H, ": (
        lambda: vmapped(alibi_slopes=normal(2, 1, B, H))
    ),
    "query under vmap must have at least one element to loop over, got ": lambda: torch.vmap(
        lambda sinks: attention(sinks=sinks, dropout_p=0.5, rng_state=STATE)
    )(normal(0, H)),
}


def in_a_tier_that_does_not_exist() -> None:
    """The tier is chosen once a process, at the first call: so in another one."""
    code = "import torch, attention_ext; print(torch.ops.attention_ext._cpu_capability())"
    env = {**os.environ, "ATTENTION_EXT_CPU_CAPABILITY": "steam"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    raise RuntimeError(done.stderr[done.stderr.index("RuntimeError: ") + len("RuntimeError: ") :])


WRONG_CALLS |= {
    "attention_ext: ATTENTION_EXT_CPU_CAPABILITY=": in_a_tier_that_does_not_exist,
    "attention_ext::_fma_peak: threads must be positive, got ": lambda: ops._fma_peak(0, False),
}


def right_call_works() -> bool:
    torch.manual_seed(0)
    tensors = (torch.randn(B, H, L, E), torch.randn(B, KV, S, E), torch.randn(B, KV, S, EV))
    query = tensors[0].requires_grad_()
    ours = ops.attention(*tensors, is_causal=True)[0]
    theirs = reference.attention(*tensors, is_causal=True)
    assert isinstance(theirs, Tensor)
    (gradient,) = torch.autograd.grad(ours.sum(), query)
    return bool(torch.allclose(ours, theirs, atol=1e-5)) and bool(gradient.isfinite().all())


def main() -> None:
    for sentence, call in WRONG_CALLS.items():
        print(json.dumps({"about to": sentence}), flush=True)
        try:
            call()
            kind, message = "no error", ""
        except Exception as error:
            kind, message = type(error).__name__, str(error)
        result = {"sentence": sentence, "kind": kind, "message": message}
        print(json.dumps({**result, "right after": right_call_works()}), flush=True)


if __name__ == "__main__":
    main()
