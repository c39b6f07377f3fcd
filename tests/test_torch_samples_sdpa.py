"""PyTorch's own sample inputs for scaled_dot_product_attention, run through ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db

import attention_ext as ae
from cases import inaccuracy

OP = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _call(function: Any, sample: Any, *, seed: int = 0, **more: Any) -> tuple[Tensor, ...]:
    """The output and the gradients of all that requires grad."""
    tensors = [sample.input, *sample.args, *sample.kwargs.values()]
    leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(seed)
    out = function(sample.input, *sample.args, **{**sample.kwargs, **more})
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def _samples(dtype: torch.dtype) -> list[Any]:
    samples = list(OP.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 10  # an empty generator must not pass
    return samples


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Plain dense attention, every step in the inputs' dtype (torch's own goes through float32)."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    score = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).tril() == 0, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        score = score.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        score = score + attn_mask
    return score.softmax(-1) @ value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_torch_give_torchs_results(dtype: torch.dtype) -> None:
    """Without dropout, against torch's float64, by the tolerance rule.

    The samples are numbers up to 9, 8 of them in a row, and their softmax is nearly one-hot:
    gradients of query and key are differences of equal numbers. Plain attention may happen to be
    exact there, where the rounding of those numbers in the accumulation type is allowed.
    """
    exact_type = torch.float64 if dtype == torch.float64 else torch.float32
    rounding = (9 * 8) * (9 * 8**-0.5) * torch.finfo(exact_type).eps
    for n, sample in enumerate(_samples(dtype)):
        exact = sample.transform(
            lambda x: (
                x.detach().double().requires_grad_(x.requires_grad)
                if isinstance(x, Tensor) and x.is_floating_point()
                else x
            )
        )
        with sdpa_kernel(SDPBackend.MATH):
            want = _call(torch.nn.functional.scaled_dot_product_attention, exact, dropout_p=0.0)
        plain = _call(_plain, sample, dropout_p=0.0)
        got = _call(ae.scaled_dot_product_attention, sample, dropout_p=0.0)
        for index, (x, y, z) in enumerate(zip(got, want, plain, strict=True)):
            assert (x.dtype, x.shape) == (dtype, y.shape)
            # Rows that see nothing are zeros, whatever torch gives.
            y, z = y.nan_to_num(0), z.nan_to_num(0)
            label = f"sample {n}, {sample.summary()}, result {index}"
            if dtype == torch.float32:
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-3, msg=label)
            else:
                problem = inaccuracy(x, y, z)
                assert not problem or (x.double() - y).abs().max() <= rounding, (
                    f"{label}: {problem}"
                )


def test_samples_of_torch_with_their_dropout() -> None:
    """The random numbers are not torch's: shapes are, and equal seeds repeat."""
    dropped = 0
    for sample in _samples(torch.float64):
        if not sample.kwargs.get("dropout_p"):
            continue
        dropped += 1
        first = _call(ae.scaled_dot_product_attention, sample)
        again = _call(ae.scaled_dot_product_attention, sample)
        other = _call(ae.scaled_dot_product_attention, sample, seed=1)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
        want = torch.nn.functional.scaled_dot_product_attention(
            sample.input, *sample.args, **sample.kwargs
        )
        assert first[0].shape == want.shape
    assert dropped > 0


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    "args",
    [
        (_numbers(8), _numbers(7, 8), _numbers(7, 8)),
        (_numbers(1, 2, 5, 8), _numbers(1, 2, 7, 9), _numbers(1, 2, 7, 8)),
        (_numbers(2, 2, 5, 8), _numbers(3, 2, 7, 8), _numbers(3, 2, 7, 8)),
        (_numbers(1, 5, 5, 8), _numbers(1, 2, 7, 8), _numbers(1, 2, 7, 8)),
        (_numbers(1, 2, 5, 8), _numbers(1, 2, 7, 8, dtype=torch.float64), _numbers(1, 2, 7, 8)),
        (*[_numbers(1, 2, 5, 8)] * 3, _numbers(5, 6)),
        (*[_numbers(1, 2, 5, 8)] * 3, _numbers(2, 1, 2, 5, 5)),
        (*[_numbers(1, 2, 5, 8)] * 3, _numbers(3, 1, 5, 5)),
        (*[_numbers(1, 2, 5, 8)] * 3, _numbers(5, 5, dtype=torch.int64)),
        (*[_numbers(1, 2, 5, 8)] * 3, None, 1.5),
        (*[_numbers(1, 2, 5, 8)] * 3, None, -0.1),
        (*[_numbers(1, 2, 5, 8, dtype=torch.int32)] * 3,),
    ],
    ids=[
        "one_dimension",
        "sizes",
        "batches",
        "heads",
        "dtypes",
        "mask_keys",
        "mask_dimensions",
        "mask_batch",
        "mask_dtype",
        "dropout_above_one",
        "dropout_below_zero",
        "integers",
    ],
)
def test_what_torch_refuses_is_refused(args: Any) -> None:
    for function in (
        torch.nn.functional.scaled_dot_product_attention,
        ae.scaled_dot_product_attention,
    ):
        with pytest.raises(RuntimeError):
            function(*args)
