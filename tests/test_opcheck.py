"""torch.library.opcheck on every op: schema, autograd registration, fake kernels, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext  # noqa: F401
from cases import CASES, Case, PackedCase, params, raw, raw_packed

ops: Any = torch.ops.attention_ext

SMALL = {"tiny", "unbatched", "two_batch_dims", "mask_single", "grouped"}
SAMPLES: list[Case | PackedCase] = [
    *(case for case in CASES if case.name in SMALL),
    Case("contiguous", 5, 7, 8),
    Case("heads_last", 5, 7, 8, layout="heads_last", bias="1HLS"),
    Case("strided", 5, 7, 8, layout="strided", mask="BHLS"),
    Case("expanded", 5, 7, 8, layout="expanded", bias="B1LS"),
    Case("key_mask", 5, 7, 3, key_mask="float", alibi="BH", query_offset="per batch"),
    Case("no_queries", 0, 7, 8, sinks=True),
    Case("no_keys", 5, 0, 8, sinks=True),
    Case("no_size", 5, 7, 0, 4),
    Case("no_value_size", 5, 7, 8, 0),
    Case("no_batch", 5, 7, 8, batch=(0,)),
    Case("everything", 5, 7, 8, 6, heads=4, kv_heads=2, mask="LS", bias="BHLS", key_mask="bool",
         window=(3, 1), softcap=2.0, sinks=True, alibi="H", dropout_p=0.5),
    PackedCase("packed", (2, 0, 3), (4, 1, 2), 8, sinks=True, alibi="BH", query_offset="per batch"),
]  # fmt: skip


def _call(
    case: Case | PackedCase, requires_grad: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = case.make(dtype, requires_grad=requires_grad)
    return (raw_packed if isinstance(case, PackedCase) else raw)(args, kwargs)


def _forward(
    case: Case | PackedCase, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    args, kwargs = _call(case, dtype=dtype)
    results = [x if x is None else x.detach() for x in ops.attention(*args, **kwargs)]
    return args, kwargs, results


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = {"everything", "packed", "heads_last", "no_keys", "two_batch_dims"}  # seconds each


def _opcheck(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: bool = True) -> None:
    """Every sample passes the quick checks, some are also traced with dynamic shapes."""
    utils = (*QUICK, "test_aot_dispatch_dynamic") if traced else QUICK
    results = torch.library.opcheck(op, args, kwargs, test_utils=utils)
    assert results == dict.fromkeys(utils, "SUCCESS")


@pytest.mark.parametrize("case", params(SAMPLES))
def test_attention(case: Case | PackedCase) -> None:
    _opcheck(ops.attention.default, *_call(case), traced=case.name in TRACED)


@pytest.mark.slow
@pytest.mark.parametrize("case", params(SAMPLES))
def test_attention_backward(case: Case | PackedCase) -> None:
    args, kwargs, results = _forward(case)
    wanted = [True, True, True, args[4] is not None, args[6] is not None]
    incoming = [torch.randn_like(x) for x in results[:2]]
    backward_args = (*incoming, *args, *results, wanted)
    _opcheck(ops.attention_backward.default, backward_args, kwargs, case.name in TRACED)


@pytest.mark.parametrize("grads", [(True, False), (False, True), (False, False)])
def test_attention_backward_without_some_incoming_gradients(grads: tuple[bool, bool]) -> None:
    args, kwargs, results = _forward(SAMPLES[0])
    incoming = [x if given else None for x, given in zip(results[:2], grads, strict=True)]
    wanted = [True, False, True, False, False]
    backward_args = (*incoming, *args, *results, wanted)
    _opcheck(ops.attention_backward.default, backward_args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_and_its_backward_in_16_bits(dtype: torch.dtype) -> None:
    case = SAMPLES[0]
    _opcheck(ops.attention.default, *_call(case, dtype=dtype))
    args, kwargs, results = _forward(case, dtype)
    output, *_, rest = results
    assert (rest.dtype, rest.shape, rest.stride()) == (dtype, output.shape, output.stride())
    backward_args = (output, None, *args, *results, [True, True, True, False, False])
    _opcheck(ops.attention_backward.default, backward_args, kwargs)


WEIGHTED = [
    (case, average_heads)
    for case in SAMPLES
    if isinstance(case, Case)
    for average_heads in ((False, True) if case.name in ("everything", "grouped") else (False,))
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "average_heads"), WEIGHTED, ids=str)
def test_attention_weights_and_their_backward(case: Case, average_heads: bool) -> None:
    args, kwargs, (_, logsumexp, residual, _) = _forward(case)
    tensors = (*args[:2], *args[3:])
    traced = case.name in TRACED
    more = {**kwargs, "average_heads": average_heads}
    _opcheck(ops.attention_weights.default, (*tensors, logsumexp, residual), more, traced)
    weights = ops.attention_weights(*tensors, logsumexp, residual, **more).detach()
    wanted = [True, True, args[4] is not None, args[6] is not None]
    backward_args = (weights, *tensors, logsumexp, residual, wanted)
    _opcheck(ops.attention_weights_backward.default, backward_args, more, traced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", params(SAMPLES))
def test_fake_results_have_the_real_strides_and_storage_of_their_own(
    case: Case | PackedCase, dtype: torch.dtype
) -> None:
    args, kwargs = _call(case, requires_grad=False, dtype=dtype)
    on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
    for real, fake in zip(
        ops.attention(*args, **kwargs), ops.attention(*on_meta, **kwargs), strict=True
    ):
        if dtype == torch.float32 and real is None:
            assert fake is None
            continue
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert real.storage_offset() == 0
        assert real.untyped_storage().nbytes() == real.numel() * real.element_size()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "heads_last", "strided", "expanded"])
def test_gradients_are_contiguous_where_inputs_are_and_else_lie_like_the_output(
    layout: str, weights: bool
) -> None:
    args, kwargs, results = _forward(Case(layout, 5, 7, 8, layout=layout))  # type: ignore[arg-type]
    if weights:
        more = {**kwargs, "average_heads": False}
        tensors = (*args[:2], *args[3:], *results[1:3])
        incoming = ops.attention_weights(*tensors, **more).detach()
        op, call = ops.attention_weights_backward, (incoming, *tensors, [True, True, False, False])
        kwargs = more
    else:
        op = ops.attention_backward
        call = (results[0], None, *args, *results, [True, True, True, False, False])
    on_meta = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
        for x in call
    ]
    grads, fake = op(*call, **kwargs), op(*on_meta, **kwargs)
    for x, grad, meta in zip(args[:2] if weights else args[:3], grads, fake, strict=False):
        as_output = torch.empty(x.transpose(1, 2).shape).transpose(1, 2)
        assert x.is_contiguous() == (layout == "contiguous")
        expected = torch.empty(x.shape) if x.is_contiguous() else as_output
        assert grad.stride() == meta.stride() == expected.stride()


def test_ops_are_marked_as_safe_to_compile() -> None:
    for name in ("", "_backward", "_weights", "_weights_backward"):
        op = getattr(ops, f"attention{name}").default
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert not op._schema.is_mutable
