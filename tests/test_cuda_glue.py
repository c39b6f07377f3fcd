"""The CUDA glue without a GPU: it compiles against torch's own headers, and run over stand-ins it
gives the kernels what every case of the table asks for.

Here the glue's own files run: the allocation of results, views and tables of batch offsets, small
tensors in other dtypes, dropout's state and packed borders left on the device, the order of the
passes, workspaces, errors. The kernels behind it are the shipped sources as host C++
(test_cuda_simt.py has their own tests).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import cuda_build
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attention_ext as ae
from cases import CASES, PACKED_CASES, Case, PackedCase, assert_accurate, evaluate, raw, raw_packed
from cuda_glue import compile_glue, run_emulated, sources, why_not
from tables import expected

FLOAT32, BFLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float64

pytestmark = pytest.mark.slow  # the glue is compiled against headers of torch
emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made")

# What differs between calls for the glue; the kernels' own variety is test_cuda_simt.py's.
NAMES = [
    "one_number", "odd", "unbatched", "two_batch_dims", "tail_of_one", "strided", "sliced",
    "expanded", "expanded_last", "grouped", "one_kv_head", "mask_2d", "mask_of_batch",
    "mask_of_rows", "mask_single", "mask_unbatched", "mask_two_batch_dims", "key_mask_float",
    "bias_2d", "bias_of_heads", "bias_of_batch", "bias_of_rows", "bias_single",
    "bias_unbatched", "bias_and_key_mask", "causal_dead", "window_zero", "window_away",
    "offset_per_batch", "sinks", "alibi_per_batch", "scale_zero", "dropout", "everything",
    "packed", "packed_none", "packed_empty", "packed_causal", "packed_everything",
]  # fmt: skip
TABLE: list[Case | PackedCase] = [c for c in [*CASES, *PACKED_CASES] if c.name in NAMES]


def choices() -> list[Any]:
    """(case, dtype): float32 for all, the others where the glue has to convert."""
    converting = (
        "odd",
        "sinks",
        "key_mask_float",
        "alibi_per_batch",
        "bias_of_batch",
        "everything",
    )
    chosen = [(case, FLOAT32) for case in TABLE]
    chosen += [(c, d) for c in TABLE if c.name in converting for d in (FLOAT64, BFLOAT16)]
    return [pytest.param(c, d, id=f"{c.name}-{str(d)[6:]}") for c, d in chosen]


def run_choices(path: str) -> None:
    """In the emulating process: writes what every choice gives, forward alone and with gradients
    (of results that no kernel wrote: NaN)."""
    torch.use_deterministic_algorithms(True)
    table: dict[tuple[str, str], Any] = {}
    for choice in choices():
        case, dtype = choice.values
        op = ae.attention if isinstance(case, Case) else ae.varlen_attention
        more: dict[str, Any] = {"return_lse": True}
        args, kwargs = case.make(dtype)
        forward = evaluate(op, args, kwargs, **more)
        args, kwargs = case.make(dtype, requires_grad=True)
        table[case.name, str(dtype)] = (forward, evaluate(op, args, kwargs, **more))
    torch.save(table, path)


@pytest.fixture(scope="module")
def results() -> Any:
    """What `run_choices` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.pt"
        run_emulated(f"import test_cuda_glue; test_cuda_glue.run_choices({str(path)!r})")
        return torch.load(path)


@emulated
@pytest.mark.parametrize("case, dtype", choices())
def test_every_call_reaches_the_kernels_as_it_was_meant(
    results: Any, case: Case | PackedCase, dtype: torch.dtype
) -> None:
    forward, both = results[case.name, str(dtype)]
    truth, plain = expected(case, dtype)
    assert_accurate({n: both[n] for n in truth}, truth, plain, case.name)
    for name, x in forward.items():
        assert torch.equal(x, both[name]), f"{name} differs when gradients are wanted"


@emulated
def test_weights_and_their_gradients_are_those_of_the_cpu() -> None:
    """In float64, of every head and their mean, with a bias and with two batch dimensions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        run_emulated(f"import test_cuda_glue; torch.save(test_cuda_glue.weights(), {str(path)!r})")
        theirs = torch.load(path)
    ours = weights()
    assert theirs.keys() == ours.keys()
    for name, x in ours.items():
        torch.testing.assert_close(theirs[name], x, rtol=1e-10, atol=1e-12, msg=name)
        assert theirs[name].stride() == x.stride(), name


def weights() -> dict[str, torch.Tensor]:
    found = {}
    for name in ("two_batch_dims", "bias_of_heads", "mask_two_batch_dims", "sinks", "bias_single"):
        case = next(c for c in CASES if c.name == name)
        for how in (True, "mean"):
            args, kwargs = case.make(FLOAT64, requires_grad=True)
            for key, x in evaluate(ae.attention, args, kwargs, return_weights=how).items():
                found[f"{name} {how} {key}"] = x
    return found


@emulated
def test_one_wanted_gradient_is_the_same_as_all_of_them() -> None:
    """Each input alone, the value's without a gradient of the output among them."""
    code = """
import json
from cases import case_named
case = case_named("sinks", bias="1HLS")
args, kwargs = case.make(torch.float64, requires_grad=True)
leaves = [*args, kwargs["attn_bias"], kwargs["sinks"]]
import attention_ext as ae
out, lse = ae.attention(*args, **kwargs, return_lse=True)
lse = lse.masked_fill(lse.isinf(), 0)
worst = 0.0
for loss in (out.square().sum(), lse.square().sum()):
    every = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    for x, g in zip(leaves, every):
        alone, = torch.autograd.grad(loss, [x], retain_graph=True, materialize_grads=True)
        worst = max(worst, float((alone - g).abs().max()))
    print(float(every[2].abs().max()))
print(worst)
"""
    of_output, of_lse, worst = map(float, run_emulated(code).stdout.split()[-3:])
    assert of_output > 0 and of_lse == 0
    assert worst == 0


@emulated
def test_the_device_is_never_waited_for() -> None:
    """No operator that reads a value, and none that could copy from the host: a captured graph
    would repeat a copy from memory that is gone."""
    code = """
import json
import attention_ext as ae
from cases import CASES, PACKED_CASES
names = ("mask_two_batch_dims", "everything", "alibi_per_batch", "packed_everything")
seen = set()
for case in [*CASES, *PACKED_CASES]:
    if case.name in names:
        args, kwargs = case.make(torch.float32)
        # The checks may read values that lie on the CPU, as these do: not the glue's affair.
        from cases import raw, raw_packed
        positional, options = (raw if case in CASES else raw_packed)(args, kwargs)
        with torch.profiler.profile() as profile:
            torch.ops.attention_ext.attention(*positional, **options)
        seen |= {event.name for event in profile.events()}
print(json.dumps(sorted(seen)))
"""
    seen = set(json.loads(run_emulated(code).stdout.splitlines()[-1]))
    assert "attention_ext::attention" in seen
    assert "aten::arange" in seen, "tables of batch offsets are computed on the device"
    forbidden = ("item", "_local_scalar_dense", "nonzero", "lift_fresh", "from_blob", "equal")
    assert [name for name in seen if name.removeprefix("aten::") in forbidden] == []
    # Everything else that the glue may enqueue, named one by one.
    allowed = """attention empty empty_strided zeros zero_ fill_ arange mul mul_ add unsqueeze
        reshape view _unsafe_view to _to_copy copy_ contiguous clone transpose
        as_strided select slice resize_ new_empty detach empty_like"""
    rest = {name.split("::")[-1] for name in seen if "::" in name} - set(allowed.split())
    assert rest == set()


@emulated
def test_dropout_takes_its_state_from_the_device_at_run_time() -> None:
    """As a replayed CUDA graph does: the same call sees what was written there later."""
    code = """
import attention_ext as ae
q = torch.randn(1, 2, 33, 8, dtype=torch.float64)
state = torch.tensor([7, 0, 0, 0, 0, 0])
ops = torch.ops.attention_ext
one = ops.attention(q, q, q, rng_state=state, dropout_p=0.5)[0]
same = ops.attention(q, q, q, rng_state=state.clone(), dropout_p=0.5)[0]
state[0] = 8
other = ops.attention(q, q, q, rng_state=state, dropout_p=0.5)[0]
print(torch.equal(one, same), torch.equal(one, other))
"""
    assert run_emulated(code).stdout.split()[-2:] == ["True", "False"]


@emulated
def test_counted_tiles_follow_the_mask() -> None:
    code = """
ops = torch.ops.attention_ext
q = torch.randn(1, 1, 256, 8)
counter = torch.zeros(1, dtype=torch.int64)
ops._count_visited_tiles(counter)
ops.attention(q, q, q)
full = int(counter)
counter.zero_()
ops.attention(q, q, q, is_causal=True)
causal = int(counter)
ops._count_visited_tiles(None)
counter.zero_()
ops.attention(q, q, q)
print(full, causal, int(counter))
try:
    ops._count_visited_tiles(torch.zeros(1))
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    lines = run_emulated(code).stdout.splitlines()
    assert lines[-2] == "16 10 0"
    assert lines[-1].startswith("_count_visited_tiles: counter must be one int64")


# ---- Errors ------------------------------------------------------------------------------------

TRY = """
import attention_ext
q = torch.randn(1, 2, 5, 8)
def attempt(*args, **kwargs):
    try:
        torch.ops.attention_ext.attention(*args, **kwargs)
        print("fine")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


def said(code: str, **env: str) -> list[str]:
    return run_emulated(TRY + code, env=env).stdout.splitlines()


@emulated
def test_arguments_are_checked_before_a_device_is_asked_for() -> None:
    lines = said("attempt(q, q[..., :4], q)\nattempt(q, q, q)", STAND_IN_MISSING="1")
    assert lines[-2].startswith("attention: key must have the query's size E")
    assert lines[-1] == "the CUDA stand-in has no device"


@emulated
def test_a_launch_that_fails_is_an_error_of_the_op_and_the_next_call_works() -> None:
    """Double precision wants more shared memory than this device has, single does not."""
    code = "attempt(q.double(), q.double(), q.double())\nattempt(q, q, q)"
    lines = said(code, STAND_IN_SHARED_MEMORY="50000")
    assert lines[-2] == (
        "attention: CUDA could not run the kernels: a kernel needs more shared "
        "memory than a block of this device may have"
    )
    assert lines[-1] == "fine"


@emulated
def test_a_device_older_than_the_kernels_is_refused() -> None:
    assert said("attempt(q, q, q)", STAND_IN_MAJOR="7")[-1] == (
        "attention: the kernels need compute capability 8.0 (Ampere) or newer, and device 0 has 7.0"
    )


@emulated
def test_grids_larger_than_the_device_allows_run_in_pieces() -> None:
    code = """
torch.manual_seed(0)
q = torch.randn(3, 2, 70, 8, dtype=torch.float64)
print(float(torch.ops.attention_ext.attention(q, q, q)[0].square().sum()))
"""
    pieces, whole = said(code, STAND_IN_GRID="3")[-1], said(code)[-1]
    assert pieces == whole


# ---- Against torch's own headers ---------------------------------------------------------------


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.name)
def test_the_glue_compiles_against_the_headers_of_torch(source: Path, tmp_path: Path) -> None:
    """The CPU wheel has c10's CUDA headers but for one file that its build writes."""
    try:
        toolkit = cuda_build.find_toolkit()
    except cuda_build.CudaBuildError as error:
        pytest.skip(f"the CUDA runtime's headers are not here: {error}")
    macros = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    macros.parent.mkdir(parents=True)
    macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    assert compile_glue(source, tmp_path / "glue.o", [tmp_path, toolkit.include_dir]) == ""


def test_the_glue_includes_only_what_every_cuda_build_of_torch_has() -> None:
    for path in [*sources(), *sources()[0].parent.glob("*.h")]:
        text = path.read_text()
        assert "<ATen/cuda" not in text, path  # wants headers of cusparse, cublas and others
        for word in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", ".item("):
            assert word not in text, (path, word)


# ---- Fake tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_fake_cuda_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(
    case: Case | PackedCase, dtype: torch.dtype
) -> None:
    """Real ones on the CPU, which has the same rules."""
    args, kwargs = case.make(dtype)
    positional, options = (raw if isinstance(case, Case) else raw_packed)(args, kwargs)
    ops = torch.ops.attention_ext
    real = ops.attention(*positional, **options)
    wanted = [True, True, True, positional[4] is not None, positional[6] is not None]
    q, k, v, *tensors = positional
    incoming = torch.ones_like(real[0])
    grads = ops.attention_backward(incoming, None, q, k, v, *tensors, *real, wanted, **options)
    with FakeTensorMode(allow_non_fake_inputs=False):

        def fake(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")

        q, k, v, *tensors = map(fake, positional)
        made = ops.attention(q, k, v, *tensors, **options)
        fake_grads = ops.attention_backward(
            fake(incoming), None, q, k, v, *tensors, *made, wanted, **options
        )
    for ours, theirs in [*zip(made, real, strict=True), *zip(fake_grads, grads, strict=True)]:
        if theirs is None:
            assert ours is None
            continue
        assert ours.device == torch.device("cuda:0")
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.stride() == theirs.stride()


# ---- The build's decision ----------------------------------------------------------------------


@pytest.fixture
def toolkit_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit of CUDA 13.0 as far as the build looks at one, its nvcc behind a wrapper."""
    root = tmp_path / "toolkit"
    for path in ("include/cuda_runtime.h", "lib64/libcudart.so"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    nvcc = tmp_path / "wrapper" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"\n'
        f'else echo "#$ TOP={root}/bin/.." >&2; fi\n'
    )
    nvcc.chmod(0o755)
    (root / "bin").mkdir()
    for name in (
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "ATTENTION_EXT_CUDA",
        "ATTENTION_EXT_CUDA_ARCHS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    return root


def test_cuda_is_built_for_a_cuda_torch_with_a_toolkit_of_its_major(toolkit_tree: Path) -> None:
    toolkit, reason = cuda_build.decide("13.2")
    assert toolkit is not None and reason == ""
    assert toolkit.root == toolkit_tree and toolkit.version == "13.0"
    assert toolkit.runtime == toolkit_tree / "lib64" / "libcudart.so"


def test_the_reason_for_not_building_cuda_is_given(
    toolkit_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_build.decide(None) == (None, "torch is a CPU build (torch.version.cuda is None)")
    toolkit, reason = cuda_build.decide("12.6")
    assert toolkit is None
    assert reason.startswith("nvcc is of CUDA 13.0") and "torch of CUDA 12.6" in reason
    (toolkit_tree / "include/cuda_runtime.h").unlink()
    assert "cuda_runtime.h is missing" in cuda_build.decide("13.0")[1]
    monkeypatch.setenv("CUDA_HOME", str(toolkit_tree / "nowhere"))
    assert cuda_build.decide("13.0")[1] == f"no nvcc: {toolkit_tree}/nowhere/bin/nvcc is not found"
    monkeypatch.setenv("ATTENTION_EXT_CUDA", "off")
    assert cuda_build.decide("13.0") == (None, "ATTENTION_EXT_CUDA=off")
    monkeypatch.setenv("ATTENTION_EXT_CUDA", "on")
    with pytest.raises(
        cuda_build.CudaBuildError, match="=on, but a CUDA build is not possible: no"
    ):
        cuda_build.decide("13.0")
    monkeypatch.setenv("ATTENTION_EXT_CUDA", "yes")
    with pytest.raises(cuda_build.CudaBuildError, match="must be auto, on or off, got 'yes'"):
        cuda_build.decide("13.0")


def test_the_list_of_devices_becomes_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTENTION_EXT_CUDA_ARCHS", raising=False)
    eighty = ["-gencode", "arch=compute_80,code=[sm_80]"]
    ninety = ["-gencode", "arch=compute_90,code=[sm_90,compute_90]"]
    assert cuda_build.arch_flags() == [*eighty, *ninety]
    assert cuda_build.arch_flags("8.0; 9.0+PTX") == [*eighty, *ninety]
    assert cuda_build.arch_flags("120a") == ["-gencode", "arch=compute_120a,code=[sm_120a]"]
    monkeypatch.setenv("ATTENTION_EXT_CUDA_ARCHS", "80")
    assert cuda_build.arch_flags() == eighty
    for wrong in ("75", "sm_80", "80+ptx", "native"):
        with pytest.raises(cuda_build.CudaBuildError, match="must list devices of 8"):
            cuda_build.arch_flags(wrong)
