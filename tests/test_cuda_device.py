"""The ops on a real CUDA device: the table of cases, and what only a device can show.

Skipped without one; benchmarks/gpu_check.sh runs them there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import _build_info
from cases import (
    CASES,
    DTYPES,
    PACKED_CASES,
    Case,
    PackedCase,
    assert_accurate,
    case_named,
    differentiable,
    evaluate,
    params,
    raw,
)
from tables import expected
from tiers import run_python


def why_not() -> str:
    """Why there is nothing to run here; empty if there is a device."""
    if _build_info.CUDA is None:
        return f"attention_ext was built without CUDA: {_build_info.CUDA_REASON}"
    return "" if torch.cuda.is_available() else "no CUDA device (or no driver)"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a device is here")

ops: Any = torch.ops.attention_ext


def on_host(results: dict[str, Tensor]) -> dict[str, Tensor]:
    assert all(x.is_cuda for x in results.values())
    return {name: x.cpu() for name, x in results.items()}


# ---- The table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", params([*CASES, *PACKED_CASES]))
def test_outputs_and_gradients_are_accurate(case: Case | PackedCase, dtype: torch.dtype) -> None:
    op = ae.attention if isinstance(case, Case) else ae.varlen_attention
    truth, plain = expected(case, dtype)
    args, kwargs = case.make(dtype, "cuda", requires_grad=True)
    assert_accurate(on_host(evaluate(op, args, kwargs, return_lse=True)), truth, plain, case.name)


@pytest.mark.parametrize("how", [True, "mean"])
@pytest.mark.parametrize(
    "name", ["odd", "grouped", "bias_of_heads", "dropout_masked", "everything"]
)
def test_weights_and_their_gradients_are_those_of_the_cpu(name: str, how: bool | str) -> None:
    case = case_named(name)
    found = [
        evaluate(ae.attention, *case.make(torch.float64, device, True), return_weights=how)
        for device in ("cuda", "cpu")
    ]
    for key, want in found[1].items():
        torch.testing.assert_close(found[0][key].cpu(), want, rtol=1e-9, atol=1e-11, msg=key)
        assert found[0][key].stride() == want.stride(), key


@pytest.mark.parametrize("name", ["dropout", "dropout_masked", "dropout_decode", "everything"])
def test_dropout_drops_what_the_cpu_drops(name: str) -> None:
    """Bit for bit: weights are zero at the same places."""
    case = case_named(name)
    dropped = []
    for device in ("cuda", "cpu"):
        args, kwargs = case.make(torch.float32, device)
        dropped.append(ae.attention(*args, **kwargs, return_weights=True)[1].cpu() == 0)
    assert torch.equal(*dropped)
    assert dropped[0].any() and not dropped[0].all()


@pytest.mark.parametrize(
    "name", ["odd", "bias_of_heads", "sinks", "everything", "two_batch_dims", "bias_single"]
)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = case_named(name, q_len=7, k_len=67, hidden_bias=False, dropout_p=0.0)
    args, kwargs = case.make(torch.float64, "cuda", requires_grad=True)
    named = differentiable(args, kwargs)

    def call(*leaves: Tensor) -> Any:
        given = dict(zip(named, leaves, strict=True))
        tensors = [given.pop(name) for name in ("query", "key", "value")]
        out, lse = ae.attention(*tensors, **{**kwargs, **given}, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(call, tuple(named.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tuple(named.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ["long_both", "bias_of_heads", "dropout", "packed_everything"])
def test_equal_calls_give_equal_bits(name: str, dtype: torch.dtype) -> None:
    case = next(c for c in [*CASES, *PACKED_CASES] if c.name == name)
    op = ae.attention if isinstance(case, Case) else ae.varlen_attention
    args, kwargs = case.make(dtype, "cuda", requires_grad=True)
    first = evaluate(op, args, kwargs, return_lse=True)
    for _ in range(3):
        again = evaluate(op, args, kwargs, return_lse=True)
        assert all(torch.equal(x, again[name]) for name, x in first.items())


# ---- Bad input, unread ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "borders",
    [[0, 5, 3, 12], [1, 5, 8, 12], [0, 5, 8, 11], [0, 5, 8, 1 << 40], [0, -(1 << 40), 8, 12]],
    ids=["falling", "late", "short", "long", "negative"],
)
def test_bad_borders_on_the_device_give_nan_and_touch_nothing(borders: list[int]) -> None:
    x = torch.randn(12, 2, 8, device="cuda", requires_grad=True)
    good = torch.tensor([0, 5, 8, 12], device="cuda")
    bad = torch.tensor(borders, device="cuda")
    for pair in ((bad, good), (good, bad)):
        out = ae.varlen_attention(x, x, x, *pair)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.cuda.synchronize()
        assert out.isnan().all()
        assert grad.isnan().all()
    assert not ae.varlen_attention(x, x, x, good, good).isnan().any()


def test_a_switch_checks_borders_on_the_device() -> None:
    code = """
import torch, attention_ext as ae
x = torch.randn(12, 2, 8, device="cuda")
borders = torch.tensor([0, 5, 3, 12], device="cuda")
ae.varlen_attention(x, x, x, borders, borders)
"""
    run_python(code)
    done = run_python(code, env={"ATTENTION_EXT_CHECK_VALUES": "1"}, check=False)
    assert "cu_seqlens_q must never fall, got 5 before 3" in done.stderr


def test_an_error_on_the_way_leaves_the_next_call_working() -> None:
    q = torch.randn(1, 2, 5, 8, device="cuda")
    with pytest.raises(RuntimeError, match="key must be on the query's device cuda:0, got cpu"):
        ops.attention(q, q.cpu(), q)
    torch.testing.assert_close(
        ops.attention(q, q, q)[0].cpu(), ops.attention(q.cpu(), q.cpu(), q.cpu())[0]
    )


# ---- Streams, graphs, devices, memory ------------------------------------------------------------


def step(case: Case, args: Any, kwargs: Any) -> dict[str, Tensor]:
    return evaluate(ae.attention, args, kwargs, return_lse=True, seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ["everything", "mask_two_batch_dims", "alibi_per_batch"])
def test_a_captured_graph_repeats_the_call_on_new_numbers(name: str, dtype: torch.dtype) -> None:
    """Queries and dropout's state change between replays."""
    case = case_named(name, dropout_p=0.2)
    args, kwargs = case.make(dtype, "cuda")
    op = partial(ae.attention, **kwargs, return_lse=True)
    static = [x.clone() for x in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*static)
    for seed in (1, 2):
        args, more = case.make(dtype, "cuda", seed=seed)
        for x, y in zip(static, args, strict=True):
            x.copy_(y)
        kwargs["rng_state"].copy_(more["rng_state"])
        # Fill freed memory: a captured copy from it would be seen.
        del more
        torch.full((1 << 20,), torch.nan, device="cuda")
        graph.replay()
        for got, want in zip(captured, op(*static), strict=True):
            assert torch.equal(got, want)


def test_gradients_are_captured_too() -> None:
    case = case_named("bias_of_heads")
    args, kwargs = case.make(torch.float32, "cuda", requires_grad=True)
    leaves = [*args, kwargs["attn_bias"]]

    def gradients() -> tuple[Tensor, ...]:
        out = ae.attention(*args, **kwargs)
        return torch.autograd.grad(out.square().sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    with torch.no_grad():
        args[0].mul_(0.5)
    graph.replay()
    for got, want in zip(captured, gradients(), strict=True):
        assert torch.equal(got, want)


def test_calls_run_on_the_current_stream() -> None:
    """Behind a long wait on a side stream: a launch elsewhere would read what is not there yet."""
    case = case_named("everything")
    want = step(case, *case.make(torch.float32, "cuda", requires_grad=True))
    args, kwargs = case.make(torch.float32, "cuda", requires_grad=True)
    held = [torch.full_like(x, torch.nan) for x in args]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late = []
        for x, y in zip(held, args, strict=True):
            x.copy_(y.detach())
            late.append(x.requires_grad_())
        got = step(case, late, kwargs)
    side.synchronize()
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_nothing_waits_for_the_device() -> None:
    calls: list[Callable[[], Any]] = []
    for name in ("everything", "mask_two_batch_dims", "bias_of_heads", "key_mask_float"):
        args, kwargs = case_named(name).make(torch.bfloat16, "cuda", requires_grad=True)
        calls.append(partial(ae.attention, *args, **kwargs, return_weights="mean"))
    packed = next(c for c in PACKED_CASES if c.name == "packed_everything")
    args, kwargs = packed.make(torch.float32, "cuda", requires_grad=True)
    calls.append(partial(ae.varlen_attention, *args, **kwargs))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            results = call()
            first = results[0] if isinstance(results, tuple) else results
            first.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second device")
def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    """The current device is another one, and stays it."""
    case = case_named("everything")
    want = step(case, *case.make(torch.float32, "cuda:0", requires_grad=True))
    assert torch.cuda.current_device() == 0
    got = step(case, *case.make(torch.float32, "cuda:1", requires_grad=True))
    assert torch.cuda.current_device() == 0
    for name, x in want.items():
        assert got[name].device == torch.device("cuda:1")
        assert torch.equal(got[name].cpu(), x.cpu()), name


def test_memory_grows_with_the_rows_and_not_with_the_scores() -> None:
    n, heads = 8192, 4
    q = torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(1, heads, 1, n, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ae.attention(q, q, q, attn_bias=bias).sum().backward()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    scores = heads * n * n * 2  # bytes in bfloat16
    assert grown < scores / 4, f"{grown} bytes beside {scores} of scores"


def test_more_heads_than_a_grid_dimension_holds() -> None:
    """65,535 blocks are the limit of y and z; and offsets here pass 2^31 elements."""
    q = torch.randn(70_000, 1, 3, 8, device="cuda")
    out = ops.attention(q, q, q)[0]
    picked = [0, 65_535, 65_536, 69_999]
    want = ops.attention(q[picked], q[picked], q[picked])[0]
    assert torch.equal(out[picked], want)
    wide = torch.empty(3, 1 << 30, device="cuda", dtype=torch.float16).normal_()
    rows = wide[:, :: 1 << 26].reshape(3, 1, 1, 16).expand(3, 1, 5, 16)
    far = torch.as_strided(wide, (1, 1, 3, 16), (0, 0, 1 << 30, 1))
    near = far.contiguous()
    assert torch.equal(ops.attention(far, far, far)[0], ops.attention(near, near, near)[0])
    assert ops.attention(rows, rows, rows)[0].isfinite().all()


def test_work_follows_the_mask() -> None:
    q = torch.randn(1, 1, 512, 64, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    counts = []
    ops._count_visited_tiles(counter)
    try:
        for causal in (False, True):
            counter.zero_()
            ops.attention(q, q, q, is_causal=causal)
            counts.append(int(counter))
    finally:
        ops._count_visited_tiles(None)
    assert counts[0] == 64 and counts[1] == 36  # tiles of 64 x 64


# ---- Above the op --------------------------------------------------------------------------------


def test_torch_compile_and_autocast_reach_the_kernels() -> None:
    q, k, v = (torch.randn(2, 4, 40, 16, device="cuda", requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda *x: ae.attention(*x, is_causal=True), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), ae.attention(q, k, v, is_causal=True))
    with torch.autocast("cuda", torch.bfloat16):
        assert ae.attention(q, k, v).dtype == torch.bfloat16


def test_the_default_dropout_state_follows_the_devices_seed() -> None:
    q = torch.randn(1, 2, 40, 16, device="cuda")
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(ae.attention(q, q, q, dropout_p=0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("name", ["odd", "everything", "packed_everything"])
def test_opcheck_accepts_the_op_on_the_device(name: str) -> None:
    if name.startswith("packed"):
        from cases import raw_packed

        case = next(c for c in PACKED_CASES if c.name == name)
        positional, options = raw_packed(*case.make(torch.float32, "cuda"))
    else:
        positional, options = raw(*case_named(name).make(torch.float32, "cuda"))
    torch.library.opcheck(ops.attention.default, positional, options)
