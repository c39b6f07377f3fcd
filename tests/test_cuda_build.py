"""The library built for CUDA, on a machine without a GPU: it links, loads and explains itself.

`make cuda-check` makes such a build beside the usual one and runs this file there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attention_ext as ae
from attention_ext import _build_info, _loader
from cases import CASES, PACKED_CASES, Case, PackedCase, case_named, params, raw, raw_packed
from wrong_calls import NO_OPTIONS

pytestmark = pytest.mark.skipif(
    _build_info.CUDA is None, reason=f"built without CUDA: {_build_info.CUDA_REASON}"
)

ops: Any = torch.ops.attention_ext
OPS = ("attention", "attention_backward", "attention_weights", "attention_weights_backward")
CUDA_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


def test_every_op_has_a_kernel_for_cuda() -> None:
    for name in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attention_ext::{name}", "CUDA")


def test_the_library_needs_torchs_own_cuda_libraries_and_no_others() -> None:
    dynamic = subprocess.run(
        ["readelf", "-d", str(_loader.LIBRARY)], check=True, capture_output=True, text=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    cuda = {name for name in needed if re.search("cu(da|rt|blas|dnn|sparse|solver)", name)}
    assert _build_info.TORCH_CUDA is not None
    major = _build_info.TORCH_CUDA.split(".")[0]
    assert cuda == {"libc10_cuda.so", "libtorch_cuda.so", f"libcudart.so.{major}"}


def test_one_cuda_runtime_serves_torch_and_us() -> None:
    code = (
        "import torch, attention_ext\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(*sorted(f for f in files if 'libcudart' in f), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout


def test_the_report_names_the_toolkit_and_the_devices() -> None:
    from attention_ext.__main__ import report

    (line,) = [x for x in report().splitlines() if x.startswith("CUDA ")]
    assert "arch=compute_80" in line and "nvcc" in line


def calls(tensor: torch.Tensor, wrong: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """For every op, arguments that are right but for one."""
    options = list(NO_OPTIONS.values())
    rows = tensor[..., 0]
    return {
        "attention": (tensor, wrong, tensor),
        "attention_backward": (
            *(tensor, None, tensor, wrong, tensor, *options),
            *(tensor, rows, rows, None, [True, True, True, False, False]),
        ),
        "attention_weights": (tensor, wrong, *options, rows, rows),
        "attention_weights_backward": (
            *(tensor[..., :3], tensor, wrong, *options),
            *(rows, rows, [True, True, False, False]),
        ),
    }


@pytest.mark.parametrize("name", OPS)
def test_cudas_functions_check_their_arguments_before_they_want_a_device(name: str) -> None:
    """CPU tensors, sent to the CUDA key by hand."""
    x = torch.ones(1, 2, 3, 8)
    op = getattr(ops, name).default
    with pytest.raises(RuntimeError, match=f"{name}: key must have the query's size"):
        op.redispatch(CUDA_KEY, *calls(x, x[..., :4])[name])


@without_device
@pytest.mark.parametrize("name", OPS)
def test_without_a_driver_a_call_is_an_ordinary_error_and_the_cpu_goes_on(name: str) -> None:
    x = torch.ones(1, 2, 3, 8)
    op = getattr(ops, name).default
    with pytest.raises(RuntimeError, match=r"(?i)driver|no CUDA|device"):
        op.redispatch(CUDA_KEY, *calls(x, x)[name])
    torch.testing.assert_close(ops.attention(x, x, x)[0], x)


# ---- Fake tensors --------------------------------------------------------------------------------


def faked(case: Case | PackedCase, dtype: torch.dtype = torch.float16) -> Any:
    """Arguments on the device "cuda", without data."""
    args, kwargs = case.make(dtype)
    positional, options = (raw if isinstance(case, Case) else raw_packed)(args, kwargs)

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    return [fake(x) for x in positional], options


@pytest.mark.parametrize("case", params([*CASES, *PACKED_CASES]))
def test_fake_calls_and_their_gradients_work_on_cuda(case: Case | PackedCase) -> None:
    """All four ops and what their Nodes give. (Autograd's engine itself starts a thread for each
    device and so wants a real one.)"""
    with FakeTensorMode():
        positional, options = faked(case)
        names = ["query", "key", "value", "attn_mask", "attn_bias", "key_mask", "sinks"]
        leaves = {n: x for n, x in zip(names, positional, strict=False) if x is not None}
        leaves = {n: x for n, x in leaves.items() if n not in ("attn_mask", "key_mask")}
        for x in leaves.values():
            x.requires_grad_()
        out, lse, residual, _ = ops.attention(*positional, **options)
        results = [out, lse]
        gradients = [x for x in out.grad_fn(*map(torch.ones_like, results)) if x is not None]
        expected = list(leaves.values())
        if not isinstance(case, PackedCase):
            q, k, _, *tensors = positional
            weights = ops.attention_weights(q, k, *tensors, lse, residual, **options)
            results.append(weights)
            gradients += [x for x in weights.grad_fn(torch.ones_like(weights)) if x is not None]
            expected += [x for n, x in leaves.items() if n != "value"]
    for x in [*results, *gradients]:
        assert x.device.type == "cuda"
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    assert out.transpose(-2, -3).is_contiguous()
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in expected]


def test_the_python_api_takes_fake_cuda_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 8, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(1, 4, 5, 5, device="cuda")
        out, lse = ae.attention(q, q, q, attn_bias=bias, is_causal=True, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert out.device.type == lse.device.type == "cuda"


# ---- The CPU's half of the same library ----------------------------------------------------------


@pytest.mark.parametrize("name", ["odd", "everything"])
def test_opcheck_accepts_the_cpu_ops_of_this_library(name: str) -> None:
    positional, options = raw(*case_named(name).make(torch.float32, requires_grad=True))
    torch.library.opcheck(ops.attention.default, positional, options)
