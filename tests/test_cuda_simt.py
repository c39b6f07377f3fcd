"""The CUDA kernels without tensor cores, run on the host: right, and clean under sanitizers.

The kernels' own files are compiled as C++ (cuda_emulation.py) and driven as one more device of the
table of cases. A device without tensor cores (compute capability 7) makes every type take them.
"""

from __future__ import annotations

import itertools
import math
import mmap
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference
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
    gradients_with_dead_rows,
    params,
    truth_and_plain,
)
from cuda_emulation import (
    CSRC,
    NO_COMPILER,
    Emulator,
    Replay,
    build,
    can_compile,
    emulator,
    sanitized,
)
from tables import expected

pytestmark = [
    pytest.mark.slow,  # compiling takes most of a minute
    pytest.mark.skipif(not can_compile(), reason=NO_COMPILER),
]
ADDRESS, THREAD = "address,undefined", "thread"


def kernels(sanitizer: str = "", **limits: int) -> Emulator:
    return emulator(sanitizer, major=7, **limits)


def check(device: Emulator, case: Case | PackedCase, dtype: torch.dtype) -> None:
    """Results and all gradients, against float64."""
    args, kwargs = case.make(dtype, requires_grad=True)
    op = device.attention if isinstance(case, Case) else device.varlen_attention
    got = evaluate(op, args, kwargs, return_lse=True)
    # A thread adds the rows of a key's gradient in turn; what plain attention's largest error is
    # depends on the processor's matrix product.
    serial = case.name == "long_queries"
    assert_accurate(got, *expected(case, dtype), label=str(case), serial=serial)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's own small products are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- The table -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params([*CASES, *PACKED_CASES]))
def test_results_and_gradients_are_accurate(case: Case | PackedCase, dtype: torch.dtype) -> None:
    check(kernels(), case, dtype)


WEIGHTS = [
    *("odd", "two_tiles", "grouped", "mask_full", "mask_two_batch_dims", "key_mask_float"),
    *("bias_full", "bias_of_keys", "bias_two_dims", "causal_dead", "window", "softcap", "sinks"),
    *("alibi_per_batch", "dropout_masked", "everything", "decode_bias", "expanded"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [True, "mean"], ids=str)
@pytest.mark.parametrize("name", [n for n in WEIGHTS if n in {c.name for c in CASES}])
def test_weights_and_their_gradients_are_accurate(
    name: str, kind: bool | str, dtype: torch.dtype
) -> None:
    args, kwargs = case_named(name).make(dtype, requires_grad=True)
    more = {"return_lse": True, "return_weights": kind}
    got = evaluate(kernels().attention, args, kwargs, **more)
    assert_accurate(got, *truth_and_plain(args, kwargs, **more), label=name)


# ---- Gradients -------------------------------------------------------------------------------

BROADCASTS = ["".join(letters) for letters in itertools.product("B1", "H1", "L1", "S1")]


@pytest.mark.parametrize("shape", [*BROADCASTS, "LS", "1S", "L1", "11"])
def test_bias_gradients_have_the_shape_of_the_bias(shape: str) -> None:
    """Every broadcast, summed inside the kernel, over more than one tile in each dimension."""
    case = Case("bias", 70, 130, 8, batch=(3,), bias=shape, hidden_bias=shape == "BHLS")
    args, kwargs = case.make(torch.float64, requires_grad=True)
    kwargs.update(window=(60, 40), query_offset=20)
    got, want = (
        evaluate(f, args, kwargs, return_lse=True)
        for f in (kernels().attention, reference.attention)
    )
    assert got["grad_attn_bias"].shape == kwargs["attn_bias"].shape
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (1, 1), (2, 3)])
@pytest.mark.parametrize("tail", ["HLS", "1L1"])
def test_bias_gradients_where_batch_dimensions_broadcast_one_by_one(
    sizes: tuple[int, int], tail: str
) -> None:
    letters = "".join("B" if n > 1 else "1" for n in sizes) + tail
    args, kwargs = Case("bias", 5, 67, 8, batch=(2, 3), heads=2).make(
        torch.float64, requires_grad=True
    )
    shape = (*sizes, *(1 if c == "1" else {"H": 2, "L": 5, "S": 67}[c] for c in tail))
    assert len(letters) == len(shape)
    kwargs["attn_bias"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got, want = (evaluate(f, args, kwargs) for f in (kernels().attention, reference.attention))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "attn_bias", "sinks"])
@pytest.mark.parametrize("through", ["out", "lse"])
def test_any_one_gradient_alone_is_the_same(wanted: str, through: str) -> None:
    args, kwargs = case_named("everything").make(torch.float64, requires_grad=True)
    out, lse = kernels().attention(*args, **kwargs, return_lse=True)
    result = out if through == "out" else lse
    leaves = differentiable(args, kwargs)
    together = torch.autograd.grad(
        result.sin().sum(), list(leaves.values()), allow_unused=True, retain_graph=True
    )
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    results = kernels().attention(*args, **kwargs, return_lse=True)
    alone = results[0 if through == "out" else 1]
    (got,) = torch.autograd.grad(alone.sin().sum(), leaves[wanted], allow_unused=True)
    want = dict(zip(leaves, together, strict=True))[wanted]
    assert (got is None) == (want is None)
    assert got is None or torch.equal(got, want)


def _by_name(names: list[str], options: dict[str, Any], weights: Any, *values: Tensor) -> Any:
    named = dict(zip(names, values, strict=True))
    tensors = [named.pop(n) for n in ("query", "key", "value")]
    options = {**options, **named}
    return kernels().attention(*tensors, **options, return_lse=True, return_weights=weights)


@pytest.mark.parametrize("kind", ["attention", "weights", "mean"])
@pytest.mark.parametrize("name", ["tiny", "sinks", "softcap", "dropout", "bias_of_keys"])
def test_gradcheck_passes_on_the_kernels(name: str, kind: str) -> None:
    """In full at a few positions, in a random direction over several tiles."""
    for rows, keys, fast in ((3, 4, False), (130, 140, True)):
        case = case_named(name, q_len=rows, k_len=keys, size=3, value_size=2, batch=(1,))
        args, kwargs = case.make(torch.float64, requires_grad=True)
        for x in differentiable(args, kwargs).values():  # finite differences through -inf are NaN
            with torch.no_grad():
                x.masked_fill_(x.isinf(), -1.0)
        leaves = differentiable(args, kwargs)

        more: Any = {"attention": False, "weights": True, "mean": "mean"}[kind]
        call = partial(_by_name, list(leaves), kwargs, more)
        torch.autograd.gradcheck(
            call, tuple(leaves.values()), fast_mode=fast, nondet_tol=0.0, atol=1e-6
        )


# ---- Values that nobody else gets right ---------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_hidden_keys_cannot_be_felt(rows: int, bad: float) -> None:
    """Nothing of a hidden key, nor of a row to the keys it does not see, changes a bit."""
    args, _ = Case("hidden", rows, 130, 70).make(torch.float32)
    mask = torch.rand(rows, 130, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, 60] = False
    grad = torch.randn(2, 2, rows, 70)
    if rows > 1:
        mask[3] = False
        mask[5, 64:] = False
    results = []
    for value in (0.0, bad):
        q, k, v = (x.clone() for x in args)
        k[:, :, 60], v[:, :, 60] = value, value
        incoming = grad.clone()
        if rows > 1:
            incoming[:, :, 3] = value  # of a dead row
            q[:, :, 5], incoming[:, :, 5] = value, value  # sees the first keys only
        for x in (q, k, v):
            x.requires_grad_()
        out = kernels().attention(q, k, v, mask)
        results.append([out, *torch.autograd.grad(out, (q, k, v), incoming)])
    others = [i for i in range(rows) if i != 5]
    for got, want in zip(results[1][:2], results[0][:2], strict=True):
        assert torch.equal(got[:, :, others], want[:, :, others])
    for got, want in zip(results[1][2:], results[0][2:], strict=True):
        first = 64 if rows > 1 else 0  # what row 5 sees is NaN, as it should be
        assert torch.equal(got[:, :, first:], want[:, :, first:])
        assert (got[:, :, 60] == 0).all() or rows > 1
    if rows > 1:
        assert results[1][0][:, :, 5].isnan().all()
        assert (results[1][0][:, :, 3] == 0).all()


@pytest.mark.parametrize("rows", [1, 70])
def test_what_arrives_for_a_dead_row_is_not_felt(rows: int) -> None:
    clean = gradients_with_dead_rows(kernels().attention, rows, 0.0)
    for bad in (math.nan, math.inf):
        for x, y in zip(
            gradients_with_dead_rows(kernels().attention, rows, bad), clean, strict=True
        ):
            assert torch.equal(x, y)


def test_a_visible_nan_shows_in_its_row_only() -> None:
    args, _ = Case("nan", 70, 70, 8).make(torch.float32)
    args[1][:, :, 66] = math.nan
    out, lse = kernels().attention(*args, is_causal=True, return_lse=True)
    assert out[:, :, :66].isfinite().all()
    assert out[:, :, 66:].isnan().all()
    assert lse[:, :, 66:].isnan().all()


def test_a_row_of_the_smallest_number_is_a_uniform_average() -> None:
    args, _ = Case("min", 5, 70, 8).make(torch.float32, requires_grad=True)
    low = torch.finfo(torch.float32).min
    bias = torch.zeros(5, 70).index_fill(0, torch.tensor([1, 3]), low).requires_grad_()
    kwargs = {"attn_bias": bias}
    more = {"return_weights": True}
    got = evaluate(kernels().attention, args, kwargs, **more)
    torch.testing.assert_close(got["weights"][:, :, 1], torch.full((2, 2, 70), 1 / 70))
    assert_accurate(got, *truth_and_plain(args, kwargs, **more))


def test_large_float16_inputs_do_not_overflow() -> None:
    args, kwargs = case_named("wider_head").make(torch.float16, requires_grad=True)
    with torch.no_grad():
        for x in args[:2]:
            x.mul_(60)
    got = evaluate(kernels().attention, args, kwargs, return_lse=True)
    assert all(x.isfinite().all() for x in got.values())
    assert_accurate(got, *truth_and_plain(args, kwargs, return_lse=True))


@pytest.mark.parametrize("zero", ["B", "H", "L", "S", "E", "Ev"])
def test_sizes_of_zero(zero: str) -> None:
    size = {**dict.fromkeys(["B", "H"], 2), "L": 5, "S": 7, "E": 4, "Ev": 3, zero: 0}
    tensors = [
        torch.randn(size["B"], size["H"], size[n], size[e], requires_grad=True)
        for n, e in (("L", "E"), ("S", "E"), ("S", "Ev"))
    ]
    got, want = (
        evaluate(f, tensors, {}, return_lse=True)
        for f in (kernels().attention, reference.attention)
    )
    for name, x in want.items():
        torch.testing.assert_close(got[name], x)


# ---- Dropout ---------------------------------------------------------------------------------

STATES = [
    (7, 11, 0, 0, 0, 0),
    (-5, (1 << 40) + 3, 0, 0, 0, 0),
    (
        (1 << 62) + 9,
        1,
        12,
        5,
        1000,
        3,
    ),  # a shard, at a key inside a group of 8
    (1, 2, 3, 1, (1 << 31) + 5, (1 << 33) + 61),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", STATES, ids=str)
def test_dropout_drops_what_the_cpu_drops(state: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bit for bit the mask of the op on the CPU and of the reference."""
    (q, k, v), _ = Case("dropout", 70, 133, 8, heads=3).make(dtype)
    words = torch.tensor(state)
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_state": words, "return_weights": True}
    _, got = kernels().attention(q, k, v, **options)
    _, cpu = ae.attention(q, k, v, **options)
    assert torch.equal(got == 0, cpu == 0)
    assert torch.equal(got != 0, reference.dropout_mask(words, (2,), 3, 70, 133, 0.3))


def test_dropping_everything_gives_zeros() -> None:
    args, kwargs = case_named("dropout", dropout_p=1.0).make(torch.float32, requires_grad=True)
    got = evaluate(kernels().attention, args, kwargs)
    assert all((x == 0).all() for x in got.values())


# ---- Work, order, sizes ----------------------------------------------------------------------


def _tiles_with_something_visible(visible: Tensor) -> int:
    count = 0
    for rows in visible.split(64, -2):
        for tile in rows.split(64, -1):
            count += int(tile.flatten(-2).any(-1).sum())
    return count


@pytest.mark.parametrize(
    "name",
    ["two_tiles", "causal", "window", "mask_band", "window_away", "offset_per_batch", "key_mask"],
)
def test_visited_tiles_are_those_with_something_visible(name: str) -> None:
    args, kwargs = case_named(name).make(torch.float32)
    kernels().attention(*args, **kwargs)
    q, k, _ = args
    visible = reference.visible_pairs(q, k, **{n: x for n, x in kwargs.items() if n != "scale"})
    assert int(kernels().visited) == _tiles_with_something_visible(visible)


@pytest.mark.parametrize("name", ["everything", "bias_of_keys", "packed_everything"])
def test_the_order_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a grid that runs in pieces."""
    case = next(c for c in [*CASES, *PACKED_CASES] if c.name == name)
    args, kwargs = case.make(torch.float32, requires_grad=True)

    def results(device: Emulator) -> dict[str, Tensor]:
        op = device.attention if isinstance(case, Case) else device.varlen_attention
        return evaluate(op, args, kwargs, return_lse=True)

    want = results(kernels())
    found = [results(kernels(grid_blocks=3))]
    monkeypatch.setenv("AE_SHIM_SEED", "12345")
    found.append(results(kernels()))
    for got in found:
        for key, x in want.items():
            assert torch.equal(got[key], x), key


def _far_apart(x: Tensor, stride: int) -> Tensor:
    """x (1, 1, n, E) with `stride` numbers between rows, in memory of which little is touched."""
    count = (x.size(2) - 1) * stride + x.size(3)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    flat = torch.frombuffer(mmap.mmap(-1, count * x.element_size(), flags=flags), dtype=x.dtype)
    y = flat.as_strided(x.shape, (0, 0, stride, 1))
    y.copy_(x)
    return y


def test_strides_beyond_two_billion_elements() -> None:
    (q, k, v), _ = Case("far", 5, 4, 3, batch=(1,), heads=1).make(torch.float32)
    stride = (1 << 30) + 11
    far = [_far_apart(x, stride).requires_grad_() for x in (q, k, v)]
    near = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = _far_apart((torch.rand(1, 1, 5, 4) > 0.3).to(torch.uint8), stride).view(torch.bool)
    got, want = kernels().attention(*far, mask), kernels().attention(*near, mask.contiguous())
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(x.sin().sum(), y) for x, y in ((got, far), (want, near))]
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


BORDERS = {
    "falling": ([0, 50, 30, 100], [0, 40, 60, 90]),
    "too short": ([0, 50, 80], [0, 40, 90]),
    "too long": ([0, 50, 1 << 40], [0, 40, 90]),
    "not from zero": ([3, 50, 100], [0, 40, 90]),
    "negative": ([0, -50, 100], [0, 40, 90]),
    "falling keys": ([0, 50, 60, 100], [0, 80, 20, 90]),
}


@sanitized
@pytest.mark.parametrize("kind", list(BORDERS))
def test_bad_borders_of_sequences_give_nan_and_touch_nothing_else(kind: str) -> None:
    tensors = [torch.randn(n, 2, 8, requires_grad=True) for n in (100, 90, 90)]
    borders = [torch.tensor(x) for x in BORDERS[kind]]
    got = evaluate(kernels(ADDRESS).varlen_attention, [*tensors, *borders], {}, return_lse=True)
    assert {*got} == {"out", "lse", "grad_query", "grad_key", "grad_value"}
    for name, x in got.items():
        assert x.isnan().all(), name


# ---- Under sanitizers ------------------------------------------------------------------------

LOOKED_AT = [
    *("tiny", "odd", "tail_of_one", "two_batch_dims", "wide_values", "wide_head", "strided"),
    *("sliced", "columns", "expanded_last", "one_kv_head", "mask_full", "mask_of_rows"),
    *("mask_two_batch_dims", "key_mask", "key_mask_float", "bias_full", "bias_2d", "bias_of_keys"),
    *("bias_of_rows", "bias_single", "bias_and_key_mask", "decode_bias", "causal_dead", "window"),
    *("offset_per_batch", "softcap", "sinks", "alibi_per_batch", "dropout_masked", "everything"),
    *("packed", "packed_empty", "packed_none", "packed_everything"),
]
RACED = [
    *("odd", "bias_of_keys", "softcap", "sinks", "everything", "packed_empty"),
]


def named(name: str) -> Case | PackedCase:
    return next(c for c in [*CASES, *PACKED_CASES] if c.name == name)


@sanitized
@pytest.mark.parametrize("name", LOOKED_AT)
def test_no_access_leaves_its_buffer(name: str) -> None:
    """Addresses, alignment, shifts and signed overflow, in every pass."""
    dtype = DTYPES[LOOKED_AT.index(name) % len(DTYPES)]
    check(kernels(ADDRESS), named(name), dtype)


@sanitized
def test_weights_leave_no_buffer() -> None:
    args, kwargs = case_named("everything").make(torch.float32, requires_grad=True)
    for kind in (True, "mean"):
        more = {"return_weights": kind}
        got = evaluate(kernels(ADDRESS).attention, args, kwargs, **more)
        assert_accurate(got, *truth_and_plain(args, kwargs, **more))


@sanitized
@pytest.mark.parametrize("name", RACED)
def test_no_two_threads_race(name: str) -> None:
    """Within a block between barriers, and between the blocks of a grid."""
    case = named(name)
    if isinstance(case, Case):
        case = case_named(name, q_len=min(case.q_len, 70), k_len=min(case.k_len, 67), batch=(1,))
    check(kernels(THREAD), case, torch.float32 if name != "softcap" else torch.float64)


@sanitized
def test_weights_do_not_race() -> None:
    args, kwargs = case_named("everything", q_len=66, k_len=67, batch=(1,)).make(
        torch.float32, requires_grad=True
    )
    more = {"return_weights": "mean"}
    got = evaluate(kernels(THREAD).attention, args, kwargs, **more)
    assert_accurate(got, *truth_and_plain(args, kwargs, **more))


# ---- The tools find what they are for -----------------------------------------------------------


def with_bug(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of csrc/kernels in which one piece of text is another."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC / "kernels", csrc / "kernels", ignore=shutil.ignore_patterns("cpu"))
    path = csrc / "kernels" / "cuda" / "simt" / file
    text = path.read_text()
    assert text.count(right) == 1, (file, right, text.count(right))
    path.write_text(text.replace(right, wrong))
    return csrc


BUGS = {
    "a barrier too few before reading": (
        THREAD,
        "product.cuh",
        "    load_operand(right, e0, depth, operands.right);\n    __syncthreads();",
        "    load_operand(right, e0, depth, operands.right);",
        "data race",
    ),
    "a barrier too few before a buffer is used again": (
        THREAD,
        "product.cuh",
        "    if (e0 > 0) __syncthreads();",
        "",
        "data race",
    ),
    "blocks that add without an atomic": (
        THREAD,
        "tile.cuh",
        "atomicAdd(reinterpret_cast<unsigned long long*>(p.visited), shared.visited);",
        "*reinterpret_cast<unsigned long long*>(p.visited) += shared.visited;",
        "data race",
    ),
    "a row behind the last": (
        ADDRESS,
        "forward.cuh",
        "if (lane.row(r) >= at.rows) break;",
        "if (lane.row(r) > at.rows) break;",
        "heap-buffer-overflow",
    ),
    "a column behind shared memory": (
        ADDRESS,
        "tile.cuh",
        "  shared.visited = 0;\n",
        "  shared.visited = 0;\n    (&shared.visited)[8] = 1;\n",
        "AddressSanitizer",
    ),
    "threads at different barriers": (
        ADDRESS,
        "product.cuh",
        "    if (e0 > 0) __syncthreads();",
        "    if (e0 > 0 && threadIdx.x != 3) __syncthreads();",
        "threads of a block at different barriers",
    ),
    "a thread that leaves early": (
        ADDRESS,
        "forward.cuh",
        "  if (slot.empty) return;\n",
        "  if (slot.empty || threadIdx.x == 77) return;\n",
        "returned",
    ),
    "a lane that misses a shuffle": (
        ADDRESS,
        "scores.cuh",
        "    x = std::fmax(x, __shfl_xor_sync(kWholeWarp, x, step));",
        "    if (threadIdx.x != 9) x = std::fmax(x, __shfl_xor_sync(kWholeWarp, x, step));",
        "simt: ",
    ),
}


@sanitized
@pytest.mark.parametrize("bug", list(BUGS))
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    sanitizer, file, right, wrong, message = BUGS[bug]
    program = build(sanitizer, with_bug(tmp_path, file, right, wrong), only=["forward_float32"])
    args, kwargs = Case("bug", 65, 70, 40, batch=(1,), heads=2).make(torch.float32)
    device = Emulator(Replay(program))
    with pytest.raises(RuntimeError, match=message):
        device.attention(*args, **kwargs)


@sanitized
@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
def test_the_same_call_without_a_bug_is_clean(sanitizer: str) -> None:
    args, kwargs = Case("bug", 65, 70, 40, batch=(1,), heads=2).make(torch.float32)
    torch.testing.assert_close(
        kernels(sanitizer).attention(*args, **kwargs), reference.attention(*args, **kwargs)
    )


def test_a_device_with_too_little_shared_memory_is_refused() -> None:
    args, kwargs = case_named("tiny").make(torch.float64)
    with pytest.raises(RuntimeError, match="more shared memory than a block of this device"):
        kernels(shared_memory=64 * 1024).attention(*args, **kwargs)
