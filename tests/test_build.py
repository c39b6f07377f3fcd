"""The library file, its loader, and the build that makes it.

Builds run on a small tree of their own (setup.py, tools/, module.cpp and a probe or two), so that
they take seconds; the library under test is the one that was built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import attention_ext
from attention_ext import _build_info, _loader
from tiers import ROOT, TIER_VARIABLE, TIERS, run_python

PACKAGE = Path(attention_ext.__file__).resolve().parent
LIBRARY = PACKAGE / "_C.abi3.so"
TORCH_LIB = Path(torch.__file__).resolve().parent / "lib"


def tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- The loader ---------------------------------------------------------------------------------


def test_our_package_may_be_imported_before_torch() -> None:
    done = run_python(
        "import sys, attention_ext; assert 'torch' in sys.modules;"
        "import torch; print(torch.ops.attention_ext.attention.default._schema.name)"
    )
    assert done.stdout.strip() == "attention_ext::attention"


def test_importing_the_package_does_not_import_what_only_pictures_need() -> None:
    done = run_python("import sys, attention_ext; print('matplotlib' in sys.modules)")
    assert done.stdout.strip() == "False"


def copy_of_package(folder: Path, *, built_for: str | None = None, library: bool = True) -> Path:
    """A second attention_ext, its recorded torch version replaced or its library left out."""
    package = folder / "attention_ext"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    if built_for is not None:
        info = package / "_build_info.py"
        pattern = r"TORCH_VERSION: str = '.*'"
        changed, count = re.subn(pattern, f"TORCH_VERSION: str = {built_for!r}", info.read_text())
        assert count == 1
        info.write_text(changed)
    if not library:
        (package / LIBRARY.name).unlink()
    return package


@pytest.mark.slow
def test_a_library_built_for_another_torch_is_refused_with_both_versions(tmp_path: Path) -> None:
    copy_of_package(tmp_path, built_for="1.99.3+cpu")
    done = run_python("import attention_ext", cwd=tmp_path, check=False)
    last = done.stderr[done.stderr.index("ImportError") :]
    assert done.returncode == 1
    assert "built for: torch 1.99.3+cpu" in last
    assert f"you have:  torch {torch.__version__}" in last
    assert "pip install --no-build-isolation ." in last
    assert "pip install 'torch==1.99.3'" in last


def test_only_another_minor_version_is_another_torch() -> None:
    _loader.check_torch("2.13.0+cpu", True, "2.13.1", True)
    with pytest.raises(ImportError, match=r"built for: torch 2\.13\.0\n  you have:  torch 2\.14\."):
        _loader.check_torch("2.13.0", True, "2.14.0+cu130", True)
    with pytest.raises(ImportError, match=r"built for: torch 2\.13\.0 with cxx11 ABI False"):
        _loader.check_torch("2.13.0", False, "2.13.0", True)


@pytest.mark.slow
def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path, library=False)
    done = run_python("import attention_ext", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert f"looked for: {package / LIBRARY.name}" in done.stderr
    assert "python setup.py build_ext --inplace" in done.stderr


@pytest.mark.slow
def test_a_file_that_is_no_library_is_reported_with_what_the_system_said(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    (package / LIBRARY.name).write_bytes(b"not a library")
    done = run_python("import attention_ext", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "could not be loaded" in done.stderr
    assert "the loader said:" in done.stderr


@pytest.mark.slow
def test_reloading_and_loading_twice_are_harmless() -> None:
    run_python(
        "import importlib, sys, torch, attention_ext\n"
        "importlib.reload(attention_ext)\n"
        "torch.ops.load_library(attention_ext._loader.LIBRARY)\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'attention_ext']:\n"
        "    del sys.modules[name]\n"
        "import attention_ext\n"
        "torch.ops.attention_ext.attention"
    )


@pytest.mark.slow
def test_a_library_loaded_by_hand_first_is_used() -> None:
    run_python(
        f"import torch; torch.ops.load_library({str(LIBRARY)!r})\n"
        "import attention_ext; torch.ops.attention_ext.attention"
    )
    run_python(
        f"import torch, ctypes; ctypes.CDLL({str(LIBRARY)!r})\n"
        "import attention_ext; torch.ops.attention_ext.attention"
    )


@pytest.mark.slow
def test_a_second_copy_in_one_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    done = run_python(
        "import sys, attention_ext, torch\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'attention_ext']:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    import attention_ext\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "q = torch.randn(1, 1, 2, 4)\n"
        "print(torch.ops.attention_ext.attention(q, q, q)[0].shape)\n",
    )
    assert "already registered in this process by another copy" in done.stdout
    assert f"loaded:   {LIBRARY}" in done.stdout
    assert f"this one: {package / LIBRARY.name}" in done.stdout
    assert done.stdout.endswith("torch.Size([1, 1, 2, 4])\n")


# --- The report ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_the_report_names_the_build_and_the_tier_in_use(tier: str) -> None:
    done = run_python(
        "import runpy; runpy.run_module('attention_ext', run_name='__main__')", tier=tier
    )
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert lines["attention_ext"] == attention_ext.__version__
    assert lines["library"] == str(LIBRARY)
    assert lines["built for torch"].startswith(_build_info.TORCH_VERSION)
    assert lines["running torch"] == torch.__version__
    assert lines["CUDA"] == (_build_info.CUDA or f"not built: {_build_info.CUDA_REASON}")
    assert lines["compiler"] == _build_info.COMPILER
    assert lines["CPU tiers built"] == ", ".join(_build_info.TIERS)
    assert lines["CPU tier in use"] == tier
    assert int(lines["threads"]) >= 1


def tier_in_use(**env: str) -> str:
    others = {name: "" for name in (TIER_VARIABLE, "ATEN_CPU_CAPABILITY")}
    code = "import attention_ext._ops as ops; print(ops.cpu_capability())"
    return run_python(code, env=others | env).stdout.strip()


def test_the_best_tier_is_chosen_and_avx512_bf16_where_it_is_fast() -> None:
    """Its instruction is slower than float32's on processors that are not AMD's."""
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    fast = [tier for tier in TIERS if tier != "avx512_bf16" or amd]
    assert tier_in_use() == fast[-1]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["default", "avx2", "avx512"])
def test_torchs_variable_limits_the_tier(limit: str) -> None:
    """Torch has no name for avx512_bf16: its avx512 lets that in."""
    within = {
        "default": ["baseline"],
        "avx2": ["baseline", "avx2"],
        "avx512": ["baseline", "avx2", "avx512", "avx512_bf16"],
    }[limit]
    unlimited = tier_in_use()
    allowed = [tier for tier in TIERS if tier in within]
    expected = unlimited if unlimited in allowed else allowed[-1]
    assert tier_in_use(ATEN_CPU_CAPABILITY=limit) == expected


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["default", "avx2"])
def test_our_own_variable_picks_exactly(limit: str) -> None:
    for tier in TIERS:
        assert tier_in_use(**{TIER_VARIABLE: tier, "ATEN_CPU_CAPABILITY": limit}) == tier


# --- The library file ---------------------------------------------------------------------------


def test_the_library_needs_torch_and_the_c_and_cpp_runtimes_only() -> None:
    dynamic = tool("readelf", "-d", str(LIBRARY))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert {"libc10.so", "libtorch_cpu.so"} <= needed
    gomp = {name for name in needed if name.startswith("libgomp")}
    assert len(gomp) == 1
    cuda = set()
    if _build_info.CUDA:  # tests/test_cuda_build.py knows which
        cuda = {name for name in needed if "cuda" in name}
    runtimes = r"libstdc\+\+\.so|libm\.so|libgcc_s\.so|libc\.so|libpthread\.so|ld-linux"
    rest = needed - {"libc10.so", "libtorch_cpu.so"} - gomp - cuda
    assert [name for name in rest if not re.match(runtimes, name)] == []
    assert re.search(r"RUNPATH.*[\[:]\$ORIGIN/\.\./torch/lib\]", dynamic)


def test_one_openmp_runtime_serves_torch_and_us() -> None:
    done = run_python(
        "import torch, attention_ext\n"
        "q = torch.randn(1, 8, 512, 64)\n"
        "torch.ops.attention_ext.attention(q, q, q)\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(*sorted(f for f in files if 'omp' in f.rsplit('/', 1)[-1]), sep='\\n')"
    )
    assert len(done.stdout.split()) == 1, done.stdout


def test_the_library_holds_no_python_but_one_weak_symbol() -> None:
    undefined = tool("nm", "-D", "--undefined-only", str(LIBRARY)).splitlines()
    python = [line.split() for line in undefined if re.search(r"\b_?Py[A-Z_]", line)]
    assert python == [["w", "PyModule_Create2"]]


def test_a_cpp_program_without_python_can_load_the_library(tmp_path: Path) -> None:
    source = tmp_path / "load.cpp"
    source.write_text(
        "#include <dlfcn.h>\n#include <cstdio>\n"
        "int main(int, char** argv) {\n"
        "  if (dlopen(argv[1], RTLD_NOW)) return 0;\n"
        "  std::puts(dlerror());\n  return 1;\n}\n"
    )
    tool("g++", str(source), "-o", str(tmp_path / "load"), "-ldl")
    done = subprocess.run(
        [str(tmp_path / "load"), str(LIBRARY)],
        env={**os.environ, "LD_LIBRARY_PATH": str(TORCH_LIB)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def tier_objects(tier: str) -> list[Path]:
    """The objects of one tier, from the build folder of this tree."""
    objects = sorted((ROOT / "build/ninja/kernels/cpu/tiers").glob(f"*.{tier}.o"))
    if not objects:
        pytest.skip("the package was not built in this tree: build/ninja has no objects")
    return objects


@pytest.mark.parametrize("tier", _build_info.TIERS)
def test_no_symbol_of_a_tier_can_stand_in_for_anothers(tier: str) -> None:
    """A weak inline compiled with -mavx512f may win at link time and kill an older processor: all
    that a tier's objects define has the tier in its name."""
    for path in tier_objects(tier):
        defined = tool("nm", "--defined-only", "--extern-only", str(path)).splitlines()
        assert defined, path
        for line in defined:
            _, kind, name = line.split(maxsplit=2)
            own = re.match(rf"_Z[A-Z]*NK?13attention_ext7kernels{len(tier)}{tier}", name)
            assert own, f"{path.name}: {kind} {name} is outside the tier's namespace"


def test_the_library_exports_no_kernel() -> None:
    exported = tool("nm", "-DC", "--defined-only", str(LIBRARY))
    assert "PyInit__C" in exported
    leaked = [
        line
        for line in exported.splitlines()
        if re.search(rf"::({'|'.join(_build_info.TIERS)})::", line)
    ]
    assert leaked == []


# --- The dependency rule ------------------------------------------------------------------------


def test_kernels_include_nothing_of_torch_or_python() -> None:
    """kernels/ includes itself, the C++ standard library and intrinsics.

    CUDA's runtime is included in one place, beside what stands in for it in tests.
    """
    kernels = ROOT / "csrc" / "kernels"
    suffixes = (".h", ".cpp", ".inc", ".cu", ".cuh")
    files = [path for path in kernels.rglob("*") if path.suffix in suffixes]
    assert {path.suffix for path in files} >= {".h", ".cpp", ".cu", ".cuh"}
    outside = {
        "device.cuh": {"cuda_runtime.h", "simt.h", "host.h"},
        "ptx.cuh": {"ptx_host.h"},
    }
    for path in files:
        for line in path.read_text().splitlines():
            include = re.match(r'\s*#\s*include\s*(["<])([^">]*)[">]', line)
            if include is None:
                continue
            mark, name = include.groups()
            if path.parent.name == "cuda" and name in outside.get(path.name, ()):
                continue
            if mark == '"':
                inside = (path.parent / name).resolve(), (ROOT / "csrc" / name).resolve()
                assert any(p.is_file() and p.is_relative_to(kernels) for p in inside), (path, name)
            else:
                standard = re.fullmatch(
                    r"[a-z0-9_]+|std[a-z]+\.h|sched\.h|[a-z]+intrin\.h|arm_neon\.h", name
                )
                assert standard, (path, name)


def test_no_source_includes_the_header_that_takes_a_minute() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            assert "torch/extension.h" not in path.read_text(), path


# --- The build ----------------------------------------------------------------------------------


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A source tree that builds in a second: the real setup.py, an empty module, one tier file."""
    tree = tmp_path / "tree"
    (tree / "csrc/kernels/cpu/tiers").mkdir(parents=True)
    (tree / "attention_ext").mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "tools", tree / "tools")
    shutil.copy(ROOT / "csrc/module.cpp", tree / "csrc")
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "attention_ext" / name, tree / "attention_ext")
    for name in ("include", "share"):
        shutil.copytree(ROOT / "attention_ext" / name, tree / "attention_ext" / name)
    (tree / "csrc/kernels/probe.h").write_text("inline int probe() { return 1; }\n")
    (tree / "csrc/kernels/cpu/tiers/probe.cpp").write_text(
        '#include "kernels/probe.h"\n'
        "namespace ATTENTION_EXT_TIER { int value() { return probe(); } }\n"
    )
    return tree


def build(tree: Path, **env: str) -> str:
    """Builds in place and returns what was printed, the exit status in front."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return f"status {done.returncode}\n{done.stdout}"


def compiled(output: str) -> set[str]:
    assert output.startswith("status 0"), output
    return set(re.findall(r"\] (\S+)\.o$", output, flags=re.M))


@pytest.mark.slow
def test_a_build_repeats_only_what_a_change_touches(small_tree: Path) -> None:
    first = build(small_tree)
    tiers = {f"kernels/cpu/tiers/probe.cpp.{tier}" for tier in _build_info.TIERS}
    assert compiled(first) == {"module.cpp", *tiers}
    assert "attention_ext: CPU only: " in first
    assert compiled(build(small_tree)) == set()
    (small_tree / "csrc/kernels/probe.h").write_text("inline int probe() { return 2; }\n")
    assert compiled(build(small_tree)) == tiers
    assert (small_tree / "attention_ext/_C.abi3.so").is_file()


@pytest.mark.slow
def test_another_torch_rebuilds_the_glue(small_tree: Path, tmp_path: Path) -> None:
    build(small_tree)
    fake = tmp_path / "site" / "torch"
    fake.mkdir(parents=True)
    for name in ("lib", "include"):
        (fake / name).symlink_to(Path(torch.__file__).parent / name)
    (fake / "__init__.py").write_text(
        "__version__ = '2.99.1+fake'\n"
        "class version: cuda = None\n"
        "def compiled_with_cxx11_abi(): return True\n"
    )
    assert compiled(build(small_tree, PYTHONPATH=str(fake.parent))) == {"module.cpp"}
    info = (small_tree / "attention_ext/_build_info.py").read_text()
    assert "TORCH_VERSION: str = '2.99.1+fake'" in info


@pytest.mark.slow
def test_cuda_wanted_but_impossible_ends_the_build_with_the_reason(small_tree: Path) -> None:
    output = build(small_tree, ATTENTION_EXT_CUDA="on")
    assert output.startswith("status 1")
    assert "ATTENTION_EXT_CUDA=on, but a CUDA build is not possible: " in output
    assert "CPU only: ATTENTION_EXT_CUDA=off" in build(small_tree, ATTENTION_EXT_CUDA="off")
    assert "must be auto, on or off, got 'yes'" in build(small_tree, ATTENTION_EXT_CUDA="yes")


@pytest.mark.slow
def test_a_compiler_error_ends_the_build_with_its_place(small_tree: Path) -> None:
    (small_tree / "csrc/broken.cpp").write_text("int broken() { return }\n")
    output = build(small_tree)
    assert output.startswith("status 1")
    assert "broken.cpp:1:" in output
    assert "the compilation failed" in output


@pytest.mark.slow
def test_a_wheel_serves_every_python_and_pins_the_torch_it_was_built_for(small_tree: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            "out",
            ".",
        ],
        cwd=small_tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (small_tree / "out").glob("*.whl")
    assert "-cp310-abi3-linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        requires = re.findall(r"^Requires-Dist: (torch.*)$", archive.read(metadata).decode(), re.M)
    files = {"_C.abi3.so", "_build_info.py", "__init__.py", "py.typed"}
    files |= {"include/attention_ext/attention.h", "include/attention_ext/nn.h"}
    files |= {"share/cmake/attention_ext/attention_ext-config.cmake"}
    assert {f"attention_ext/{name}" for name in files} <= names
    assert requires == [f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"]


@pytest.mark.slow
def test_a_source_archive_holds_the_cpp_and_no_binary(small_tree: Path) -> None:
    build(small_tree)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=small_tree, check=True, capture_output=True
    )
    (archive,) = (small_tree / "dist").glob("*.tar.gz")
    names = tool("tar", "tzf", str(archive)).split()
    relative = {name.split("/", 1)[1] for name in names}
    assert {"csrc/module.cpp", "csrc/kernels/probe.h", "tools/build_backend.py"} <= relative
    assert {"attention_ext/py.typed", "setup.py", "LICENSE"} <= relative
    assert "attention_ext/include/attention_ext/nn.h" in relative
    assert [n for n in relative if n.endswith((".so", ".o", "_build_info.py"))] == []
