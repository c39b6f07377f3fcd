"""What nvcc makes of the tensor-core kernels, run by the PTX interpreter (tests/cuda/ptx).

The PTX is that of the shipped instances, launched by the product's own code; results are held
against float64 by the rule of cases.py. Planted bugs show that the interpreter would see them.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ptx
from cases import CASES, Case, assert_accurate, case_named, evaluate, truth_and_plain
from cuda_emulation import CSRC, ROOT, SHIM
from cuda_ptx import (
    CUDA,
    Device,
    Interpreter,
    build_interpreter,
    compile_ptx,
    interpreter,
    why_not,
)

pytestmark = [
    pytest.mark.cuda_check,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

CONFORMANCE = ROOT / "tests" / "cuda" / "conformance"
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def device() -> Device:
    kinds = ("forward", "split", "keys", "queries")
    files = [f"tensor/instances/{kind}_{name}.cu" for kind in kinds for name in TYPES]
    files += [f"simt/instances/{kind}_{name}.cu" for kind in ("rows", "bias") for name in TYPES]
    return interpreter(tuple(files))


# ---- Shipped kernels -------------------------------------------------------------------------


def sized(name: str, size: int, **changes: Any) -> Case:
    """A case with a head size that tensor cores take."""
    case = case_named(name, **changes)
    value_size = None if case.value_size is None else size * 3 // 4 // 8 * 8
    return replace(case, name=f"{name}-{size}", size=size, value_size=value_size)


# Every option at the smallest head size, everything at once at each, odd multiples of 8 between.
SHIPPED = [
    *(
        sized(name, 64)
        for name in (
            *("one_number", "tail_of_one", "one_tile", "grouped", "heads_last", "expanded"),
            *("mask_full", "mask_of_keys", "mask_of_rows", "mask_single", "key_mask"),
            *("key_mask_float", "bias_full", "bias_of_heads", "bias_of_rows", "bias_and_key_mask"),
            *("causal_bottom_right", "causal_dead", "window_zero", "window_away"),
            *("offset_per_batch", "alibi_per_batch", "softcap", "sinks", "scale_negative"),
            *("scale_zero", "dropout", "dropout_masked"),
        )
    ),
    sized("everything", 40),
    sized("everything", 128),
    sized("everything", 200),
    sized("causal", 80, q_len=130, k_len=130),
    sized("mask_band", 128, q_len=150, k_len=200, heads=1),
    sized("tail_of_one", 256, heads=1),
    sized("short_query", 128, k_len=200),
    # Keys shared out among blocks.
    sized("short_query", 64, k_len=530, heads=2, kv_heads=1),
    sized("everything", 72, q_len=2, k_len=600, window=None),
    sized("decode_group", 256, k_len=520),
]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_shipped_kernels_are_accurate(case: Case, dtype: torch.dtype, device: Device) -> None:
    args, kwargs = case.make(dtype, requires_grad=True)
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    with torch.no_grad():
        forward = device.attention(*args, **kwargs)
    report = device.report()
    assert report["products"] > 0 or "away" in case.name or "dead" in case.name
    assert "tensor" in device.interpreter.last_entry()
    assert report["matrix_conflicts"] == 0
    assert report["copy_conflicts"] == 0
    ours = evaluate(device.attention, args, kwargs, return_lse=True)
    assert_accurate(ours, truth, plain, case.name)
    assert torch.equal(forward, ours["out"])
    report = device.report()  # of the backward
    assert report["matrix_conflicts"] == 0
    assert report["copy_conflicts"] == 0


def test_equal_calls_give_equal_bits_in_any_order_of_warps(device: Device) -> None:
    args, kwargs = sized("everything", 64).make(torch.bfloat16, requires_grad=True)
    first = evaluate(device.attention, args, kwargs, return_lse=True)
    device.interpreter.reverse = True
    try:
        second = evaluate(device.attention, args, kwargs, return_lse=True)
    finally:
        device.interpreter.reverse = False
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_hidden_tiles_are_not_visited(device: Device) -> None:
    q, k, v = (torch.randn(1, 2, 256, 64).to(torch.bfloat16) for _ in range(3))
    mask = torch.zeros(256, 256, dtype=torch.bool)
    mask[:, 70:90] = True  # inside the second of four key tiles
    device.attention(q, k, v, mask)
    assert int(device.visited) == 2 * 2  # heads, query tiles of 128 rows
    device.attention(q, k, v, is_causal=True)
    assert int(device.visited) == 2 * (2 + 4)


def test_float16_gradients_do_not_overflow(device: Device) -> None:
    """dS passes 65504 here; dense float16 attention overflows."""
    random = torch.Generator().manual_seed(3)
    q, k, v = ((torch.randn(1, 1, 70, 64, generator=random) * 256).half() for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grad = (torch.randn(1, 1, 70, 64, generator=random) * 256).half()
    out = device.attention(*leaves, scale=1e-5)
    grads = torch.autograd.grad(out, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = (wide[0] @ wide[1].mT * 1e-5).softmax(-1)
    truth = torch.autograd.grad(weights @ wide[2], wide, grad.double())
    for ours, want in zip(grads, truth, strict=True):
        assert (ours.double() - want).abs().max() <= 4e-3 * want.abs().max()


# ---- Hidden values ---------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 64), (torch.float16, 64), (torch.float16, 128)], ids=str
)
def test_hidden_keys_and_dead_rows_are_not_felt(
    poison: float, dtype: torch.dtype, size: int, device: Device
) -> None:
    case = Case("hidden", 70, 130, size, batch=(1,), kv_heads=1, mask="11LS", sinks=True)
    args, kwargs = case.make(dtype, requires_grad=True)
    kwargs["attn_mask"][..., 5] = False
    kwargs["attn_mask"][..., 100] = False
    kwargs["attn_mask"][..., 33, :] = False
    clean = truth_and_plain(args, kwargs, return_lse=True)
    query, key, value = (x.detach().clone() for x in args)
    key[..., 5, 3] = poison
    value[..., 100, :] = poison
    query[..., 33, 7] = poison
    dirty = tuple(x.requires_grad_() for x in (query, key, value))
    ours = evaluate(device.attention, dirty, kwargs, return_lse=True)
    assert_accurate(ours, *clean, "hidden")


def test_a_row_that_sees_nan_is_nan_and_no_other(device: Device) -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 130, 64, generator=random).bfloat16() for _ in range(3))
    mask = torch.ones(130, 130, dtype=torch.bool)
    mask[:, 80] = False
    mask[20, :] = False
    mask[20, 70:81] = True  # row 20 alone sees key 80
    clean = device.attention(q, k, v, mask)
    v[..., 80, 5] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = device.attention(*leaves, mask)
    others = torch.arange(130) != 20
    assert torch.isnan(out[..., 20, 5]).all()
    assert torch.equal(torch.isnan(out).sum(), torch.tensor(1))
    assert (out[..., others, :] - clean[..., others, :]).abs().max() < 0.02
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert torch.isnan(grads[0][..., 20, :]).all()
    assert torch.isfinite(grads[0][..., others, :]).all()
    far = torch.ones(130, dtype=torch.bool)
    far[70:81] = False  # what row 20 does not see
    assert torch.isfinite(grads[1][..., far, :]).all()


# ---- Planted bugs ----------------------------------------------------------------------------


# The bfloat16 kernels of size 64 that bugs are planted in.
INSTANCES = """
#include "kernels/cuda/tensor/split.cuh"
namespace attention_ext::kernels::cuda::tensor {
template __global__ void forward_kernel<ScalarType::kBFloat16, 64, false>(
    const __grid_constant__ AttentionParams, int64_t);
template __global__ void split_kernel<ScalarType::kBFloat16, 64>(
    const __grid_constant__ SplitParams, int64_t);
template __global__ void join_kernel<ScalarType::kBFloat16>(
    const __grid_constant__ SplitParams, int64_t);
}
"""


@dataclass(frozen=True)
class Bug:
    """In a file of csrc/kernels/cuda/tensor, the nth occurrence of a text replaced."""

    file: str
    right: str
    wrong: str
    nth: int = 0

    def device(self, tmp_path: Path) -> Device:
        """Kernels with this bug."""
        csrc = tmp_path / "csrc"
        shutil.copytree(CSRC / "kernels", csrc / "kernels")
        source = csrc / "kernels" / "cuda" / "tensor" / self.file
        parts = source.read_text().split(self.right)
        assert len(parts) > self.nth + 1, f"{self.right!r} is not there"
        before, after = parts[: self.nth + 1], parts[self.nth + 1 :]
        source.write_text(self.right.join(before) + self.wrong + self.right.join(after))
        instance = tmp_path / "instance.cu"
        instance.write_text(INSTANCES)
        modules = compile_ptx([instance], csrc=csrc)
        host = build_interpreter(sorted(CUDA.glob("*/instances/*.cu")))
        # A library of its own, since a process loads each file once.
        copy = tmp_path / "interpreter.so"
        shutil.copy(host, copy)
        return Device(Interpreter(copy, modules))


TILE, FORWARD, SPLIT = "forward_tile.cuh", "forward.cuh", "split.cuh"


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        pytest.param(
            Bug(TILE, "__syncthreads();  // K is here", "// K is here"),
            "race in shared memory",
            id="no barrier before K is read",
        ),
        pytest.param(
            Bug(TILE, "__syncthreads();  // V is here", "// V is here"),
            "race in shared memory",
            id="no barrier before K is overwritten",
        ),
        pytest.param(
            Bug(TILE, "ptx::wait_copies<0>();", "ptx::wait_copies<1>();", nth=0),
            "has not been waited for",
            id="a wait for K that is one too weak",
        ),
        pytest.param(
            Bug(TILE, "ptx::wait_copies<0>();", "ptx::wait_copies<1>();", nth=1),
            "has not been waited for",
            id="a wait for V that is one too weak",
        ),
        pytest.param(
            Bug(FORWARD, "if (!inside) continue;", ""),
            "out of bounds",
            id="rows behind the end of the output",
        ),
        pytest.param(
            Bug(FORWARD, "if (column >= p.v_size) continue;", ""),
            "out of bounds|race between blocks",
            id="columns behind the end of a row",
        ),
    ],
)
def test_planted_bugs_are_seen(bug: Bug, message: str, tmp_path: Path, device: Device) -> None:
    random = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 200, 64, generator=random).bfloat16() for _ in range(2))
    v = torch.randn(1, 1, 200, 56, generator=random).bfloat16()
    device.attention(q, k, v)
    with pytest.raises(RuntimeError, match=message):
        bug.device(tmp_path).attention(q, k, v)


def test_a_race_between_the_parts_of_a_row_is_seen(tmp_path: Path) -> None:
    """All parts at one place."""
    q, k = torch.randn(1, 1, 1, 64).bfloat16(), torch.randn(1, 1, 512, 64).bfloat16()
    bug = Bug(SPLIT, "(split * row_count(p) + row) * p.v_size", "row * p.v_size")
    with pytest.raises(RuntimeError, match="race between blocks"):
        bug.device(tmp_path).attention(q, k, k)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("low += weight * from[0];", "low += from[0];"),
        ("sum += part.sum * shrink;", "sum += part.sum;"),
    ],
    ids=["sums", "weights"],
)
def test_parts_joined_without_their_weight_are_seen(
    right: str, wrong: str, tmp_path: Path, device: Device
) -> None:
    case = Case("parts", 3, 520, 64, batch=(1,), heads=2, kv_heads=1)
    args, kwargs = case.make(torch.bfloat16)
    truth, plain = truth_and_plain(args, kwargs, return_lse=True)
    assert_accurate(
        evaluate(device.attention, args, kwargs, return_lse=True), truth, plain, case.name
    )
    wrong_device = Bug(SPLIT, right, wrong).device(tmp_path)
    ours = evaluate(wrong_device.attention, args, kwargs, return_lse=True)
    with pytest.raises(AssertionError):
        assert_accurate(ours, truth, plain, case.name)


# ---- The interpreter itself ------------------------------------------------------------------

HEADER = ".version 9.0\n.target sm_80\n.address_size 64\n"


def small_program(body: str) -> str:
    return (
        HEADER + ".visible .entry small(.param .u64 p0, .param .u64 p1)\n{\n"
        ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;\n"
        "ld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];\nmov.u32 %r1, %tid.x;\n"
        f"mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n"
        f"{body}\nret;\n}}\n"
    )


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Interpreter]:
    so = build_interpreter()
    folder = tmp_path_factory.mktemp("interpreters")
    count = iter(range(1000))

    def load(text: str) -> Interpreter:
        copy = folder / f"{next(count)}.so"
        shutil.copy(so, copy)
        interpreter_of_its_own = Interpreter(copy, [])
        interpreter_of_its_own.load(text)
        return interpreter_of_its_own

    return load


def test_unknown_instructions_are_named(empty: Callable[[str], Interpreter]) -> None:
    with pytest.raises(RuntimeError, match=r"unknown instruction wgmma\.fence"):
        empty(small_program("wgmma.fence.sync.aligned;"))
    with pytest.raises(RuntimeError, match=r"unknown instruction ld\.weird\.u32"):
        empty(small_program("ld.weird.u32 %r2, [%rd4];"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r2, [%rd4+4];", "out of bounds"),
        ("st.global.u32 [%rd5], %r1;", "write into an input"),
        ("ld.global.u32 %r2, [%rd4+2];", "misaligned"),
        ("mov.u32 %r3, 4096; ld.shared.u32 %r2, [%r3];", "shared memory access out of bounds"),
        (
            "setp.lt.u32 %p1, %r1, 7; @%p1 bra $L1; bar.sync 0; $L1:",
            "a thread ended while its warp waits",
        ),
        (
            "setp.lt.u32 %p1, %r1, 7; @%p1 bra $L1; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"
            "bra.uni $L2; $L1: shfl.sync.bfly.b32 %r2, %r1, 2, 31, -1; $L2:",
            "the lanes of a warp wait at different instructions",
        ),
        (
            "mov.u32 %r3, 1024; st.shared.u32 [%r3], %r1;",
            "race in shared memory",
        ),
    ],
)
def test_wrong_programs_are_refused(
    body: str, message: str, empty: Callable[[str], Interpreter]
) -> None:
    program = empty(small_program(body))
    data = torch.arange(64, dtype=torch.int32)
    program.allow(data, writable=False)
    with pytest.raises(RuntimeError, match=message):
        program.run("small", 1, 64, 64, data, data)


def test_a_race_between_blocks_is_seen(empty: Callable[[str], Interpreter]) -> None:
    program = empty(small_program("st.global.u32 [%rd5], %r1;"))
    data = torch.zeros(32, dtype=torch.int32)
    program.allow(data)
    program.run("small", 1, 32, 0, data, data)
    assert data.tolist() == list(range(32))
    with pytest.raises(RuntimeError, match="race between blocks 0 and 1"):
        program.run("small", 2, 32, 0, data, data)


def test_bank_conflicts_are_counted(empty: Callable[[str], Interpreter]) -> None:
    body = (
        "mov.u32 %r3, 1024; mad.lo.s32 %r4, %r1, {stride}, %r3; mov.b32 %r5, 0;"
        "st.shared.u32 [%r4], %r5; st.shared.u32 [%r4+4], %r5; st.shared.u32 [%r4+8], %r5;"
        "st.shared.u32 [%r4+12], %r5;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r4];"
    )
    data = torch.zeros(32, dtype=torch.int32)
    for stride, conflicts in ((16, 0), (128, 4 * 7), (144, 0)):
        program = empty(small_program(body.format(stride=stride)))
        program.run("small", 1, 32, 32 * 144 + 16, data, data)
        assert program.report()["matrix_conflicts"] == conflicts, stride


# ---- Conformance: one kernel for each wrapper ------------------------------------------------


class Conformance:
    """Answers of the SIMT shim and of the interpreter for the kernels of tests/cuda/conformance."""

    def __init__(self, so: Path, program: Interpreter) -> None:
        self.shim = ctypes.CDLL(str(so))
        self.shim.conformance_name.restype = ctypes.c_char_p
        self.program = program
        self.names = [self._name(n) for n in range(self.shim.conformance_count())]

    def _name(self, n: int) -> str:
        name: bytes = self.shim.conformance_name(n)
        return name.decode()

    def answers(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """(input, the shim's output, the interpreter's output), bytes."""
        n = self.names.index(name)
        sizes = (ctypes.c_int * 3)()
        self.shim.conformance_sizes(n, sizes)
        given = torch.zeros(sizes[0], dtype=torch.uint8)
        self.shim.conformance_input(n, ctypes.c_void_p(given.data_ptr()))
        outputs = [torch.full((sizes[1],), 0xCC, dtype=torch.uint8) for _ in range(2)]
        self.shim.conformance_run(
            n, ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(outputs[0].data_ptr())
        )
        self.program.reset()
        self.program.allow(given, writable=False)
        self.program.allow(outputs[1])
        entry = f"11conformance{len(name)}{name}E"
        self.program.run(entry, 1, 32, sizes[2], given, outputs[1])
        return given, outputs[0], outputs[1]


WRAPPERS = (
    *("copy_async", "copy_groups", "load_matrices", "load_matrices_transposed"),
    *("multiply_float16", "multiply_bfloat16", "exp2_approx", "reciprocal_approx"),
    *("pack_float16", "pack_bfloat16", "unpack_float16", "unpack_bfloat16", "warp_votes"),
)


@pytest.fixture(scope="module")
def conformance(
    empty: Callable[[str], Interpreter], tmp_path_factory: pytest.TempPathFactory
) -> Conformance:
    so = tmp_path_factory.mktemp("conformance") / "host.so"
    includes = [f"-I{folder}" for folder in (CSRC, SHIM, CONFORMANCE)]
    subprocess.run(
        [
            *(cuda_ptx.CXX, "-std=c++20", "-fPIC", "-O1", "-w", "-ffp-contract=off", "-shared"),
            *("-DAE_CUDA_SHIM", *includes, str(CONFORMANCE / "host.cpp"), str(SHIM / "simt.cpp")),
            *("-o", str(so)),
        ],
        check=True,
    )
    (module,) = compile_ptx([CONFORMANCE / "record.cu"], more=[f"-I{CONFORMANCE}"])
    found = Conformance(so, empty(module.read_text()))
    assert tuple(found.names) == WRAPPERS
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_shim_and_interpreter_agree_on_every_wrapper(name: str, conformance: Conformance) -> None:
    _, shim, interpreted = conformance.answers(name)
    if name.endswith("approx"):
        a, b = shim.view(torch.float32), interpreted.view(torch.float32)
        torch.testing.assert_close(a, b, rtol=2**-21, atol=0, equal_nan=True)
    elif name.startswith(("pack", "unpack")):
        kind = torch.float32 if name.startswith("un") else TYPES[name.removeprefix("pack_")]
        a, b = shim.view(kind), interpreted.view(kind)  # NaN has many bit patterns
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(shim, interpreted)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_answer_as_a_device_did(name: str, conformance: Conformance) -> None:
    golden = CONFORMANCE / "golden" / f"{name}.bin"
    if not golden.is_file():
        pytest.skip("not recorded on a device yet: tests/cuda/conformance/record.cu")
    recorded = torch.frombuffer(bytearray(golden.read_bytes()), dtype=torch.uint8)
    _, shim, _ = conformance.answers(name)
    if name.startswith(("copy", "load", "warp")):
        assert torch.equal(shim, recorded)
        return
    packed = name.startswith("pack")
    kind = TYPES[name.removeprefix("pack_")] if packed else torch.float32
    rtol = 2**-20 if name.startswith(("exp2", "reciprocal", "multiply")) else 0
    torch.testing.assert_close(
        shim.view(kind), recorded.view(kind), rtol=rtol, atol=0, equal_nan=True
    )


def test_matrix_products_are_those_of_the_manual(conformance: Conformance) -> None:
    """Fragments laid out by the tables of the PTX manual, in torch, not by either emulation."""
    for name, dtype in TYPES.items():
        given, shim, _ = conformance.answers(f"multiply_{name}")
        halves = given[:768].view(dtype).view(32, 6, 2).float()
        sums = given[768:].view(torch.float32).view(32, 4)
        a, b, c = torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(16, 8)
        for lane in range(32):
            group, pair = divmod(lane, 4)
            for word in range(4):
                row, column = group + 8 * (word % 2), 2 * pair + 8 * (word // 2)
                a[row, column : column + 2] = halves[lane, word]
            for word in range(2):
                b[2 * pair + 8 * word : 2 * pair + 8 * word + 2, group] = halves[lane, 4 + word]
            for k in range(4):
                c[group + 8 * (k // 2), 2 * pair + k % 2] = sums[lane, k]
        want = c + a @ b  # small multiples of 1/64: exact
        got = shim.view(torch.float32).view(32, 4)
        for lane in range(32):
            group, pair = divmod(lane, 4)
            for k in range(4):
                assert got[lane, k] == want[group + 8 * (k // 2), 2 * pair + k % 2]


def test_case_names_are_used_once() -> None:
    names = [case.name for case in SHIPPED]
    assert len(names) == len(set(names))
    assert {name.rsplit("-", 1)[0] for name in names} <= {case.name for case in CASES}
