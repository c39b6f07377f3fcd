"""Builds one extension, attention_ext/_C.abi3.so, with ninja.

tools/compile_flags.py sorts the sources: tier files (kernels compiled once per instruction set),
the other kernel files (torch-free: they don't even get torch's include path), glue, the C++ API.
CUDA kernels go to nvcc; whether CUDA is built is decided in tools/cuda_build.py, and printed.
Environment: MAX_JOBS (parallel compilations), CXX, and what tools/cuda_build.py names.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
from build_backend import DEFAULT_TORCH, add_torch_to_path  # noqa: E402
from compile_flags import CSRC, TIER_FLAGS, groups  # noqa: E402

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's, not needed here

NINJA_DIR = ROOT / "build" / "ninja"

NO_TORCH = f"""the extension is compiled against the torch it will run with, and there is none here.
Install one first, then repeat the command:
    pip install {DEFAULT_TORCH}"""


class BuildError(SystemExit):
    """Ends the build with a message that says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nattention_ext: {message}\n")


def torch_requirement() -> str:
    """The run-time requirement: the minor version built against, since torch's ABI ends there."""
    if "sdist" in sys.argv or not add_torch_to_path():
        return "torch>=2.11"
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return f"torch=={major}.{minor}.*"


def job_count() -> int:
    """MAX_JOBS, or one for each core and 2 GB of memory (torch's headers take 1 to 1.6)."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, available_memory() // (2 << 30)))


def available_memory() -> int:
    """Bytes that can be had without swapping; free and cached ones count."""
    meminfo = Path("/proc/meminfo")
    found = (
        re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    )
    return int(found.group(1)) << 10 if found else 8 << 30


def find_ninja() -> str:
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError(
            "ninja is needed to build without isolation: pip install ninja nlohmann_json"
        )
    return on_path


def include_dir_of(package: str) -> str:
    """A link to the folder `include` inside an installed package, which is not imported for that.

    A link in the build folder, since an isolated build has the package in another place every time,
    and a new path would recompile everything.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            f"{package} is needed to build without isolation: pip install ninja {package}"
        )
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    link = NINJA_DIR / package
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != include:
        link.unlink(missing_ok=True)
        link.symlink_to(include, target_is_directory=True)
    return str(link)


def openmp_link_flags(torch_root: Path) -> list[str]:
    """Torch's own libgomp where it ships one (its name may carry a hash): two must never meet."""
    shipped = sorted(
        [*torch_root.glob("lib/libgomp*.so*"), *torch_root.parent.glob("torch.libs/libgomp*.so*")]
    )
    return [str(shipped[0])] if shipped else ["-fopenmp"]


def python_include() -> str:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(f"{include}/Python.h is missing: apt install python3-dev")
    return include


def ninja_escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class NinjaBuild(build_ext):
    """Writes build/ninja/build.ninja, runs ninja, puts the library and _build_info.py in place."""

    def build_extension(self, ext: Extension) -> None:
        if not add_torch_to_path():
            raise BuildError(NO_TORCH)
        import torch

        if tuple(map(int, str(torch.__version__).split(".")[:2])) < (2, 11):
            raise BuildError(f"torch 2.11 or newer is needed, this is torch {torch.__version__}")
        try:
            toolkit, cuda_reason = cuda_build.decide(torch.version.cuda)
            archs = " ".join(cuda_build.arch_flags()[1::2]) if toolkit else ""
        except cuda_build.CudaBuildError as error:
            raise BuildError(str(error)) from error
        cuda = f"{toolkit.version} ({toolkit.nvcc}), {archs}" if toolkit else None
        about = f"with CUDA {cuda}" if cuda else f"CPU only: {cuda_reason}"
        print(f"attention_ext: {about}", flush=True)

        cxx = shlex.split(os.environ.get("CXX", "g++"))
        if shutil.which(cxx[0]) is None:
            raise BuildError(f"no C++ compiler: {cxx[0]} not found (apt install g++)")
        version_line = subprocess.run(
            [*cxx, "--version"], capture_output=True, text=True, check=True
        ).stdout
        compiler = version_line.splitlines()[0]

        write_if_changed(NINJA_DIR / "build.ninja", self.ninja_text(cxx, compiler, toolkit))
        ninja = [find_ninja(), "-C", str(NINJA_DIR), f"-j{job_count()}"]
        if subprocess.run(ninja, env={"NINJA_STATUS": "[%f/%t %es] ", **os.environ}).returncode:
            raise BuildError("the compilation failed; the first error is above")

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(NINJA_DIR / target.name), str(target))
        info = "\n".join(
            [
                '"""What the extension was built for and with. Written by setup.py."""',
                "",
                f"TORCH_VERSION: str = {str(torch.__version__)!r}",
                f"CXX11_ABI: bool = {bool(torch.compiled_with_cxx11_abi())!r}",
                f"TORCH_CUDA: str | None = {torch.version.cuda!r}",
                f"CUDA: str | None = {cuda!r}",
                f"CUDA_REASON: str = {cuda_reason!r}",
                f"COMPILER: str = {compiler!r}",
                f"TIERS: tuple[str, ...] = {tuple(TIER_FLAGS)!r}",
                "",
            ]
        )
        write_if_changed(target.parent / "_build_info.py", info)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "attention_ext" / "_build_info.py"
        write_if_changed(ROOT / "attention_ext" / "_build_info.py", built.read_text())

    def ninja_text(self, cxx: list[str], compiler: str, toolkit: cuda_build.Toolkit | None) -> str:
        """One line per object. Another torch or compiler changes command lines: ninja rebuilds."""
        import torch

        torch_root = Path(torch.__file__ or "").parent
        torch_includes = [
            torch_root / "include",
            torch_root / "include" / "torch" / "csrc" / "api" / "include",
        ]
        glue_includes = [
            *map(str, torch_includes),
            include_dir_of("nlohmann_json"),
            python_include(),
        ]
        for_torch = [
            f'-DATTENTION_EXT_TORCH_VERSION="{torch.__version__}"',
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(word for include in glue_includes for word in ("-isystem", include)),
        ]
        nvcc = toolkit.nvcc if toolkit else "nvcc"
        cuda_includes = ["-isystem", str(toolkit.include_dir)] if toolkit else []
        objects: list[str] = []
        lines = [
            "ninja_required_version = 1.5",
            "rule compile",
            f"  command = {shlex.join(cxx)} -MD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $out",
            "rule cuda",
            f"  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $out",
            "rule link",
            f"  command = {shlex.join(cxx)} -shared $in -o $out $flags",
            "  description = $out",
            "",
        ]

        def compile_one(source: Path, suffix: str, flags: list[str], rule: str = "compile") -> None:
            target = f"{source.relative_to(CSRC).as_posix()}{suffix}.o"
            objects.append(target)
            lines.append(f"build {ninja_escape(target)}: {rule} {ninja_escape(str(source))}")
            lines.append("  flags = " + shlex.join(flags).replace("$", "$$"))

        for group in groups(for_all=[f'-DATTENTION_EXT_COMPILER="{compiler}"']):
            if group.cuda and not toolkit:
                continue
            flags = group.flags
            if group.torch:
                flags = [*flags, *for_torch, *(cuda_includes if group.cuda else [])]
            for source in group.sources:
                compile_one(source, group.suffix, flags)
        for source in sorted(CSRC.rglob("*.cu")) if toolkit else []:
            compile_one(source, "", cuda_build.nvcc_flags(source, cxx[0], CSRC), rule="cuda")

        link = [
            *(
                f"-L{torch_root / 'lib'}",
                "-Wl,--no-as-needed",
                "-lc10",
                "-ltorch_cpu",
                "-Wl,--as-needed",
            ),
            *(cuda_build.link_flags(toolkit) if toolkit else []),
            *openmp_link_flags(torch_root),
            *("-Wl,-z,defs", "-Wl,-rpath,$ORIGIN/../torch/lib"),
            "-Wl,-soname,_C.abi3.so",  # what C++ programs that link this file shall look for
        ]
        lines.append(f"build _C.abi3.so: link {' '.join(map(ninja_escape, objects))}")
        lines.append("  flags = " + shlex.join(link).replace("$", "$$"))
        lines.append("default _C.abi3.so")
        return "\n".join(lines) + "\n"


class FreshBuildPy(build_py):
    """Empties its target first: pip builds in the tree, and a deleted module must not stay."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "attention_ext", ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("attention_ext._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": NinjaBuild, "build_py": FreshBuildPy},
    install_requires=[torch_requirement()],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
