"""The C++ library: found by find_package, used without Python, equal to the Python package.

tests/cpp/library_cases.cpp runs the calls of cpp_cases.py; each of its numbers is compared with the
Python API's. The arithmetic is the same code on both sides, so the tolerance is the rounding of one
or two operations taken in another order: 1e-6 of the largest number in float32, 1e-14 in float64.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import _build_info, _loader
from attention_ext.integrations import aoti
from cpp_cases import (
    FUNCTION_CASES,
    MODULE_CASES,
    E,
    H,
    L,
    N,
    S,
    module_inputs,
    python_function,
    python_module,
)
from tiers import ROOT

sys.path.insert(0, str(ROOT / "examples" / "cpp"))
import train_step

TORCH = Path(torch.__file__).resolve().parent
NINJA_DIR = ROOT / "build" / "ninja"
FOUND = {name: shutil.which(name) for name in ("cmake", "g++")}
pytestmark = pytest.mark.skipif(
    None in FOUND.values(), reason=f"C++ programs need cmake and g++, found {FOUND}"
)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.0}


def call(*command: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program without a Python or library path that could help it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    done = subprocess.run(
        list(map(str, command)), env={**clean, **env}, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


def configure(source: Path, target: Path, *prefixes: Path, check: bool = True) -> str:
    prefix_path = ";".join(map(str, (*prefixes, torch.utils.cmake_prefix_path)))
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    done = call(
        *("cmake", "-S", source, "-B", target, f"-DCMAKE_PREFIX_PATH={prefix_path}", python),
        check=check,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """csrc/CMakeLists.txt's library, of the objects that setup.py made, installed in a folder."""
    if not NINJA_DIR.is_dir():
        pytest.skip("the package was not built in this tree: build/ninja has no objects")
    folder = tmp_path_factory.mktemp("library")
    target = folder / "installed"
    call(
        *("cmake", "-S", ROOT / "csrc", "-B", folder / "build"),
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        *(f"-DCMAKE_INSTALL_PREFIX={target}", f"-DATTENTION_EXT_OBJECTS={NINJA_DIR}"),
        f"-DPython3_EXECUTABLE={sys.executable}",
    )
    call("cmake", "--build", folder / "build")
    call("cmake", "--install", folder / "build")
    moved = folder / "elsewhere"  # what is installed can be moved
    target.rename(moved)
    return moved


@pytest.fixture(scope="module")
def examples(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example programs, built on the installed library."""
    folder = tmp_path_factory.mktemp("examples")
    configure(ROOT / "examples" / "cpp", folder, installed)
    call("cmake", "--build", folder, "-j2")
    return folder


@pytest.fixture(scope="module")
def cases_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """library_cases, built on the library inside the Python package."""
    folder = tmp_path_factory.mktemp("cases")
    configure(ROOT / "tests" / "cpp", folder, Path(ae.cmake_prefix_path))
    call("cmake", "--build", folder)
    return folder / "library_cases"


def run_cases(program: Path, folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """What the program made of the cases: dicts of tensors, or texts of errors."""
    torch.save(cases, folder / "cases.pt")
    threads = str(torch.get_num_threads())
    done = call(program, folder / "cases.pt", folder / "results.pt", OMP_NUM_THREADS=threads)
    assert done.stdout == f"{len(cases)} cases\n"
    results = torch.load(folder / "results.pt", weights_only=False)
    assert len(results) == len(cases)
    return list(results)


def assert_same_numbers(got: Any, want: dict[str, Tensor]) -> None:
    assert isinstance(got, dict), got
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert got[name].dtype == right.dtype, name
        assert got[name].shape == right.shape, name
        finite = right[right.isfinite()]
        atol = TOLERANCE[right.dtype] * (finite.abs().max().item() if finite.numel() else 1.0)
        torch.testing.assert_close(
            got[name], right, atol=atol, rtol=0.0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- Tests --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_module_computes_what_pythons_does(cases_program: Path, tmp_path: Path) -> None:
    """Outputs, weights, parameters and every gradient, for each way to call it."""
    cases, wanted = [], []
    for name, case in MODULE_CASES.items():
        entry, want = python_module(case, module_inputs(case), tmp_path / f"{name}.pt")
        cases.append(entry)
        wanted.append(want)
    results = run_cases(cases_program, tmp_path, cases)
    for name, got, want in zip(MODULE_CASES, results, wanted, strict=True):
        assert isinstance(got, dict), f"{name}: {got}"
        try:
            assert_same_numbers(got, want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    dead = results[list(MODULE_CASES).index("dead_rows")]
    assert (dead["weights"][:, :, [3, 17]] == 0).all()
    torch.testing.assert_close(
        dead["output"][[3, 17]], dead["parameter.out_proj.bias"].expand(2, N, E), atol=0, rtol=0
    )


@pytest.mark.slow
def test_the_functions_compute_what_pythons_do(cases_program: Path, tmp_path: Path) -> None:
    pairs = [python_function(options) for options in FUNCTION_CASES.values()]
    results = run_cases(cases_program, tmp_path, [entry for entry, _ in pairs])
    for name, got, (_, want) in zip(FUNCTION_CASES, results, pairs, strict=True):
        try:
            assert_same_numbers(got, want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.slow
def test_equal_seeds_draw_equal_parameters(cases_program: Path, tmp_path: Path) -> None:
    all_options: list[dict[str, Any]] = [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 9, "add_bias_kv": True, "sinks": True},
    ]
    cases, wanted = [], []
    for options in all_options:
        full = {"embed_dim": E, "num_heads": H, **options}
        torch.manual_seed(21)
        module = ae.MultiheadAttention(**full)
        wanted.append({f"parameter.{n}": p.detach() for n, p in module.named_parameters()})
        cases.append({"kind": "module", "options": full, "seed": 21, "wants_grad": []})
    for got, want in zip(run_cases(cases_program, tmp_path, cases), wanted, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def module_case(options: dict[str, Any], **others: Any) -> dict[str, Any]:
    x = torch.zeros(L, N, E)
    inputs = {"query": x, "key": x, "value": x} if "weights_file" not in others else {}
    full = {"embed_dim": E, "num_heads": H, **options}
    return {"kind": "module", "options": full, "wants_grad": [], **inputs, **others}


ERRORS: dict[str, dict[str, Any]] = {
    r"ValueError: embed_dim and num_heads must be greater than 0, got embed_dim=0 and num_heads=4":
        module_case({"embed_dim": 0}),
    r"ValueError: embed_dim must be divisible by num_heads, got embed_dim=24 and num_heads=5":
        module_case({"num_heads": 5}),
    r"ValueError: kdim and vdim must be greater than 0, got kdim=0 and vdim=24":
        module_case({"kdim": 0}),
    r"ValueError: num_kv_heads must be positive and divide num_heads, got num_kv_heads=3 and "
    r"num_heads=4": module_case({"num_kv_heads": 3}),
    r"ValueError: alibi cannot be combined with add_bias_kv or add_zero_attn: ":
        module_case({"alibi": True, "add_zero_attn": True}),
    r"ValueError: softcap must be finite and not negative, got -1":
        module_case({"softcap": -1.0}),
    r"ValueError: window must be \(left, right\), each a non-negative int or none, got -2":
        module_case({"window": (3, -2)}),
    r"ValueError: dropout probability has to be between 0 and 1, but got 1.5":
        module_case({"dropout": 1.5}, training=True),
    r"Error: was expecting embedding dimension of 24, but got 25":
        module_case({}, query=torch.zeros(L, N, 25)),
    r"Error: key shape \[21, 3, 24\] does not match value shape \[20, 3, 24\]":
        module_case({}, value=torch.zeros(L - 1, N, E)),
    r"Error: was expecting key and value of size 24, but got 7":
        module_case({}, key=torch.zeros(S, N, 7), value=torch.zeros(S, N, 7)),
    r"Error: key's sequence and batch dims \[21, 3\] do not match value's \[20, 3\]":
        module_case({"kdim": E, "vdim": 9}, value=torch.zeros(L - 1, N, 9)),
    r"Error: was expecting key of size 24 and value of size 9, but got 24 and 8":
        module_case({"vdim": 9}, value=torch.zeros(L, N, 8)),
    r"Error: query and key must have the same batch size, but got query \[21, 2, 24\] and key "
    r"\[21, 3, 24\] with batch_first=False": module_case({}, query=torch.zeros(L, 2, E)),
    r"Error: only bool and floating types of attn_mask are supported, got Long":
        module_case({}, attn_mask=torch.zeros(L, L, dtype=torch.int64)),
    r"Error: only bool and floating types of key_padding_mask are supported, got Byte":
        module_case({}, key_padding_mask=torch.zeros(N, L, dtype=torch.uint8)),
    r"Error: Expected key_padded_mask.shape\[1\] to be 21, but got 20":
        module_case({}, key_padding_mask=torch.zeros(N, L - 1, dtype=torch.bool)),
    r"Error: The shape of the 3D attn_mask is \[3, 21, 21\], but should be \[12, 21, 21\]\.":
        module_case({}, attn_mask=torch.zeros(N, L, L)),
    r"Error: MultiheadAttention: query must be unbatched 2-D or batched 3-D, got shape \[4\]":
        module_case({}, query=torch.zeros(4)),
    r"Error: MultiheadAttention: beside a 3-D query, key must have \[3\] dimensions, got shape "
    r"\[21, 24\]": module_case({}, key=torch.zeros(L, E)),
    r"Error: MultiheadAttention: query, key and value must be tensors, got an undefined one":
        module_case({}, value=None),
}  # fmt: skip


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_words(cases_program: Path, tmp_path: Path) -> None:
    for pattern, got in zip(
        ERRORS, run_cases(cases_program, tmp_path, list(ERRORS.values())), strict=True
    ):
        assert isinstance(got, str), pattern
        assert re.match(pattern, got), (pattern, got)


@pytest.mark.slow
def test_the_functions_say_what_pythons_say(cases_program: Path, tmp_path: Path) -> None:
    """The operators' own sentences come through, and those of the functions are Python's."""
    x = torch.zeros(2, 3, 5, 4)
    packed = torch.zeros(5, 3, 4)
    borders = torch.tensor([0, 5])
    wrong: list[dict[str, Any]] = [
        {"query": x, "key": x, "value": torch.zeros(2, 3, 6, 4)},
        {"query": x, "key": x, "value": x, "softcap": -1.0},
        {"query": x, "key": x, "value": x, "dropout_p": 1.5},
        {"query": x, "key": x, "value": x, "window": (-1, 0)},
        {"query": x, "key": x, "value": x, "attn_mask": torch.zeros(2, 5, 5, dtype=torch.bool)},
        {"query": x, "key": x, "value": x, "attn_mask": x @ x.mT, "attn_bias": x @ x.mT},
        {"query": x, "key": packed, "value": packed, "cu_seqlens_q": borders,
         "cu_seqlens_k": borders},
        {"query": packed, "key": packed, "value": packed, "cu_seqlens_q": borders,
         "cu_seqlens_k": borders, "key_mask": torch.ones(1, 5, dtype=torch.bool)},
        {"query": packed, "key": packed, "value": packed, "cu_seqlens_q": borders,
         "cu_seqlens_k": torch.tensor([0, 4])},
    ]  # fmt: skip
    results = run_cases(
        cases_program, tmp_path, [{"kind": "function", "wants_grad": [], **w} for w in wrong]
    )
    for arguments, got in zip(wrong, results, strict=True):
        with pytest.raises(RuntimeError) as said:
            packed_call = "cu_seqlens_q" in arguments
            (ae.varlen_attention if packed_call else ae.attention)(**arguments)
        assert got == f"Error: {str(said.value).splitlines()[0]}"


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named_all_at_once(cases_program: Path, tmp_path: Path) -> None:
    state = dict(ae.MultiheadAttention(E, H).state_dict())
    del state["in_proj_bias"]
    state["bias_k"] = torch.zeros(1, 1, E)
    state["out_proj.weight"] = torch.zeros(E, E + 1)
    state["out_proj.bias"] = torch.zeros(E, dtype=torch.complex64)
    files = {
        "wrong": state,
        "ordered": ae.MultiheadAttention(E, H).state_dict(),
        "nested": {"model": state},
        "list": [torch.zeros(2)],
    }
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")
    cases = [
        module_case({}, weights_file=str(tmp_path / f"{name}.pt")) for name in (*files, "absent")
    ]
    wrong, ordered, nested, in_list, absent = run_cases(cases_program, tmp_path, cases)
    assert f"{tmp_path}/wrong.pt does not fit this " in wrong
    assert "\n  missing: in_proj_bias [72]" in wrong
    assert "\n  unexpected: bias_k [1, 1, 24]" in wrong
    assert "\n  another shape: out_proj.weight, expected [24, 24], got [24, 25]" in wrong
    kind = "\n  another kind of number: out_proj.bias, expected Float, got ComplexFloat"
    assert kind in wrong
    assert wrong.count("\n") == 4
    advice = "save it with torch.save(dict(module.state_dict()), path)"
    for text in (ordered, nested, in_list):
        assert text.startswith("Error: load_state_dict: ")
        assert advice in text
    assert absent == f"Error: load_state_dict: cannot open {tmp_path}/absent.pt"


@pytest.mark.slow
def test_a_container_of_any_modules_fills_in_the_defaults(
    cases_program: Path, tmp_path: Path
) -> None:
    (got,) = run_cases(cases_program, tmp_path, [{**module_case({}), "kind": "container"}])
    assert got["weights"].shape == (N, L, L)


@pytest.mark.slow
def test_the_example_trains_a_step_to_pythons_numbers(examples: Path, tmp_path: Path) -> None:
    """Through find_package on an installed and moved library; the program counts our operators."""
    train_step.prepare(tmp_path)
    threads = str(torch.get_num_threads())
    done = call(examples / "train_step", tmp_path, OMP_NUM_THREADS=threads)
    want = train_step.expected_numbers(tmp_path)
    assert_same_numbers(train_step.load_numbers(tmp_path), want)
    assert len(want) == 3 + 2 * 5
    assert done.stdout.splitlines() == [
        f"loss {want['loss']:.6f}",
        "attention ran 1 times",
        "attention_backward ran 1 times",
        "attention_weights ran 1 times",
    ]
    failed = call(examples / "train_step", tmp_path / "nowhere", check=False)
    assert failed.returncode == 1
    assert "load_state_dict: cannot open" in failed.stderr


class Block(torch.nn.Module):
    """A model around our module, with the masks that an exported program must carry."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = ae.MultiheadAttention(
            32, 4, batch_first=True, num_kv_heads=2, sinks=True, window=(7, None)
        )

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        output, weights = self.attention(normed, normed, normed, padding, is_causal=True)
        return x + output, weights


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_package_runs_in_cpp(examples: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Exported with dynamic sizes, compiled by AOTInductor, run on other sizes without Python."""
    model = Block().to(dtype).eval()

    def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[0, :3] = True  # under the causal mask these rows see no key
        return torch.randn(batch, length, 32, dtype=dtype), padding

    batch, length = torch.export.Dim("b", min=2, max=64), torch.export.Dim("l", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(
            model, inputs(3, 24), dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length})
        )
        package = torch._inductor.aoti_compile_and_package(
            aoti.prepare(program), package_path=str(tmp_path / "model.pt2")
        )
        given = inputs(2, 40)
        want = model(*given)
    torch.save(list(given), tmp_path / "inputs.pt")
    done = call(examples / "run_package", package, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    assert done.stdout == "attention ran 1 times\n"
    got = torch.load(tmp_path / "outputs.pt", weights_only=False)
    for name, a, b in zip(("output", "weights"), got, want, strict=True):
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            a, b, atol=tolerance, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert (got[1][0, :3] == 0).all()


@pytest.mark.slow
def test_the_documented_flags_do_without_cmake(tmp_path: Path) -> None:
    """The program needs an operator only, and calls nothing by name that the linker would see."""
    text = (ROOT / "docs" / "cpp.md").read_text()
    (command,) = re.findall(r"^```sh\n(g\+\+.*?)```$", text, re.M | re.S)
    (tmp_path / "app.cpp").write_text(
        "#include <attention_ext/attention.h>\n"
        "#include <ATen/core/dispatch/Dispatcher.h>\n"
        "int main() {\n"
        '  c10::Dispatcher::singleton().findSchemaOrThrow("attention_ext::attention", "");\n'
        "}\n"
    )
    script = f"cd {shlex.quote(str(tmp_path))} && {command}"
    call("sh", "-c", script, TORCH=str(TORCH), AE=ae.cmake_prefix_path)
    call(tmp_path / "app")


def ninja_commands() -> dict[str, list[str]]:
    """The flags of every object that setup.py compiles."""
    text = (NINJA_DIR / "build.ninja").read_text()
    found = re.findall(r"^build (\S+\.o): compile \S+\n  flags = (.*)$", text, re.M)
    return {target: shlex.split(flags) for target, flags in found}


# What marks a rebuild, and the ABI that torch's CMake files name only where it isn't the usual one.
MARKS = ("-DATTENTION_EXT_COMPILER", "-DATTENTION_EXT_TORCH", "-D_GLIBCXX_USE_CXX11_ABI=1")


def essential(flags: list[str]) -> list[str]:
    """What gives the code: without search paths, file names and what marks a rebuild."""
    words: Iterator[str] = iter(flags)
    kept = []
    for word in words:
        if word in ("-isystem", "-o", "-c", "-MF", "-MT"):
            next(words)
        elif not word.startswith(("-I", "-MD", *MARKS)):
            kept.append(word)
    return kept


def test_cmake_compiles_the_same_files_with_the_same_flags(tmp_path: Path) -> None:
    if not (NINJA_DIR / "build.ninja").is_file():
        pytest.skip("the package was not built in this tree: there is no build.ninja")
    call(
        *("cmake", "-S", ROOT / "csrc", "-B", tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        *(f"-DPython3_EXECUTABLE={sys.executable}", f"-DNLOHMANN_JSON_INCLUDE={tmp_path}"),
    )
    by_cmake = {}
    for entry in json.loads((tmp_path / "compile_commands.json").read_text()):
        flags = shlex.split(entry["command"])[1:]
        tier = re.search(r"-DATTENTION_EXT_TIER=(\w+)", entry["command"])
        source = Path(entry["file"]).resolve().relative_to(ROOT / "csrc").as_posix()
        by_cmake[source + (f".{tier[1]}" if tier else "") + ".o"] = essential(flags)
    by_setup = {
        target: essential(flags)
        for target, flags in ninja_commands().items()
        if not re.search(r"(^|/)cuda/|register_cuda|^module\.cpp", target)
    }
    assert len(by_setup) > 30
    assert by_cmake.keys() == by_setup.keys()
    for target, flags in by_setup.items():
        assert by_cmake[target] == flags, target


def test_cmake_refuses_what_it_cannot_build(tmp_path: Path) -> None:
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    cuda = call(
        *("cmake", "-S", ROOT / "csrc", "-B", tmp_path / "a", prefix, "-DATTENTION_EXT_CUDA=ON"),
        check=False,
    )
    assert cuda.returncode != 0
    assert "CMake builds the CPU half only" in cuda.stderr
    objects = call(
        *("cmake", "-S", ROOT / "csrc", "-B", tmp_path / "b", prefix),
        f"-DATTENTION_EXT_OBJECTS={tmp_path}",
        check=False,
    )
    assert objects.returncode != 0
    assert f"there are no objects in {tmp_path}" in " ".join(objects.stderr.split())


def test_a_library_for_another_torch_is_not_found(tmp_path: Path) -> None:
    package = tmp_path / "attention_ext"
    shutil.copytree(
        _loader.PACKAGE_DIR, package, ignore=shutil.ignore_patterns("__pycache__", "*.py")
    )
    info = (_loader.PACKAGE_DIR / "_build_info.py").read_text()
    (package / "_build_info.py").write_text(info.replace(_build_info.TORCH_VERSION, "1.99.0"))
    said = configure(ROOT / "tests" / "cpp", tmp_path / "build", package, check=False)
    assert "it was built for Torch 1.99, and this is Torch" in " ".join(said.split())
    (package / "_C.abi3.so").unlink()
    said = configure(ROOT / "tests" / "cpp", tmp_path / "build", package, check=False)
    assert "its compiled library is missing" in " ".join(said.split())


def test_the_public_headers_need_no_file_of_the_source_tree() -> None:
    for path in (_loader.PACKAGE_DIR / "include").rglob("*.h"):
        for name in re.findall(r'#include ["<]([^">]+)[">]', path.read_text()):
            own = (_loader.PACKAGE_DIR / "include" / name).is_file()
            of_torch = any(
                (TORCH / i / name).is_file() for i in ("include", "include/torch/csrc/api/include")
            )
            assert own or of_torch or re.fullmatch(r"[a-z_]+", name), (path, name)
