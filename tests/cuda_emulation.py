"""The CUDA kernels as a device without a GPU: their own files as host C++ (tests/cuda/shim).

    device = emulator()                      # in this process
    device = emulator("thread")              # in a process of its own, under a sanitizer
    out = device.attention(q, k, v, **options)           # as ae.attention, differentiable
    out = device.varlen_attention(q, k, v, borders_q, borders_k, **options)

Results that no kernel wrote are NaN. Compiled files are kept in build/cuda_shim, one folder for
each state of the sources.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

Test = TypeVar("Test", bound=Callable[..., object])
ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SHIM = ROOT / "tests" / "cuda" / "shim"
TYPES = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}
CXX = os.environ.get("CXX", "g++")
NO_COMPILER = f"no C++ compiler: {CXX} is not found"
NO_SANITIZER = "sanitizers are set up for x86-64"

# -ffp-contract=off: a product is fused where the source says fma, as nvcc's -fmad=false has it.
FLAGS = ["-std=c++20", "-fPIC", "-ffp-contract=off", "-w", "-DAE_CUDA_SHIM"]
OPTIMIZATION = {"": ["-O2"], "address,undefined": ["-O1", "-g1"], "thread": ["-O1", "-g1"]}
SANITIZER_MACRO = {
    "address,undefined": "-DAE_SHIM_ADDRESS_SANITIZER",
    "thread": "-DAE_SHIM_THREAD_SANITIZER",
}


def can_compile() -> bool:
    return shutil.which(CXX.split()[0]) is not None


def sanitized(test: Test) -> Test:
    """Marks a test of kernels under a sanitizer: their build takes a minute of two processors."""
    can = can_compile() and platform.machine() in ("x86_64", "AMD64")
    marked: Test = pytest.mark.skipif(not can, reason=NO_SANITIZER)(test)
    return pytest.mark.cuda_check(marked)


# ---- Building --------------------------------------------------------------------------------


def _sources(csrc: Path) -> list[Path]:
    return [
        *sorted((csrc / "kernels" / "cuda").glob("*/instances/*.cu")),
        csrc / "kernels" / "cuda" / "launch.cpp",
        *(SHIM / name for name in ("simt.cpp", "call.cpp")),
    ]


def _state(csrc: Path, flags: Sequence[str]) -> str:
    """A name for the contents of everything that is compiled."""
    kernels = csrc / "kernels"
    files = [*kernels.glob("*.h"), *(kernels / "cuda").rglob("*"), *SHIM.iterdir()]
    digest = hashlib.sha256(" ".join([CXX, *flags]).encode())
    for file in sorted(files):
        if file.is_file():
            digest.update(str(file.name).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def build(sanitizer: str = "", csrc: Path = CSRC, only: Sequence[str] = ()) -> Path:
    """A shared library, or with a sanitizer the program `replay`. Two compilers at a time.

    `only` names the instances to compile; calls of the others end the program.
    """
    flags = [*FLAGS, *OPTIMIZATION[sanitizer], *(f"-DAE_ONLY_{name}" for name in only)]
    if sanitizer:
        flags.append(SANITIZER_MACRO[sanitizer])
    folder = ROOT / "build" / "cuda_shim" / _state(csrc, flags)
    result = folder / ("replay" if sanitizer else "simt.so")
    if result.is_file():
        return result
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        files = [*_sources(csrc), *([SHIM / "replay.cpp"] if sanitizer else [])]
        files = [f for f in files if not only or f.suffix != ".cu" or f.stem in only]
        commands = []
        for k, file in enumerate(files):
            # The scheduler moves the threads that the thread sanitizer looks at.
            looked_at = sanitizer and not (sanitizer == "thread" and file.parent == SHIM)
            own = [f"-fsanitize={sanitizer}"] if looked_at else []
            if looked_at and sanitizer != "thread":
                own.append("-fno-sanitize-recover=all")
            command = [CXX, *flags, *own, f"-I{csrc}", f"-I{SHIM}", "-x", "c++", "-c", str(file)]
            commands.append([*command, "-o", str(work / f"{k}.o")])
        _run_two_at_a_time(commands)
        link = [f"-fsanitize={sanitizer}"] if sanitizer else ["-shared"]
        if only and sanitizer:
            link += ["-no-pie", "-Wl,--unresolved-symbols=ignore-all"]
        objects = [str(work / f"{k}.o") for k in range(len(files))]
        _run_two_at_a_time([[CXX, *objects, *link, "-o", str(work / result.name)]])
        folder.mkdir(exist_ok=True)
        os.replace(work / result.name, result)
    return result


def _run_two_at_a_time(commands: Sequence[Sequence[str]]) -> None:
    running: list[subprocess.Popen[str]] = []

    def finish() -> None:
        process = running.pop(0)
        _, errors = process.communicate()
        assert process.returncode == 0, f"{process.args!r}\n{errors[-3000:]}"

    for command in commands:
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        if len(running) == 2:
            finish()
    while running:
        finish()


# ---- Calls -----------------------------------------------------------------------------------


class Call:
    """A params struct and the passes run on it: commands that a library or `replay` follows."""

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.buffers: list[Tensor] = []  # one for each storage
        self._places: dict[int, int] = {}

    def place(self, x: Tensor) -> tuple[int, int]:
        """(buffer, offset in bytes) of a tensor's first element."""
        storage = x.untyped_storage()
        if storage.nbytes() == 0:  # empty, yet defined
            x = torch.zeros(8, dtype=torch.uint8)
            storage = x.untyped_storage()
        if storage.data_ptr() not in self._places:
            self._places[storage.data_ptr()] = len(self.buffers)
            self.buffers.append(x)
        return self._places[storage.data_ptr()], x.storage_offset() * x.element_size()

    def integer(self, name: str, value: int) -> None:
        self.commands.append(("integer", name, int(value)))

    def real(self, name: str, value: float) -> None:
        self.commands.append(("real", name, float(value)))

    def pointer(self, name: str, x: Tensor | None) -> None:
        if x is not None:
            assert x.is_contiguous()
            self.commands.append(("pointer", name, *self.place(x)))

    def view(self, name: str, x: Tensor | None, batch: Sequence[int], tail: int = 3) -> None:
        """A tensor of (*batch, tail dimensions), each full or 1; fewer dimensions broadcast."""
        if x is None:
            return
        strides = [0, 0, 0, 0]
        first = 4 - tail if tail == 3 else 1  # rows (head, row) use the strides of 1 and 2
        for k in range(min(tail, x.dim())):
            d = x.dim() - 1 - k
            strides[first + tail - 1 - k] = x.stride(d) if x.size(d) > 1 else 0
        table = -1
        leading = x.dim() - tail
        if leading == 1:
            strides[0] = x.stride(0) if x.size(0) > 1 else 0
        elif leading > 1:  # a table of offsets, also where one stride would do
            offsets = torch.zeros(batch, dtype=torch.int64)
            for d in range(leading):
                step = x.stride(d) if x.size(d) > 1 else 0
                shape = [1] * leading
                shape[d] = batch[d]
                offsets += step * torch.arange(batch[d]).view(shape)
            table = self.place(offsets.flatten())[0]
        place = self.place(x)
        self.commands.append(("view", name, *place, *strides, table, TYPES[x.dtype]))

    def run(self, *passes: str) -> None:
        self.commands.extend(("run", name) for name in passes)


class Library:
    """Follows commands in this process."""

    def __init__(self, path: Path) -> None:
        self.so = ctypes.CDLL(str(path))
        self.so.ae_call_new.restype = ctypes.c_void_p
        self.so.ae_call_run.restype = ctypes.c_char_p
        self.so.ae_call_workspace.restype = ctypes.c_int64
        self.workspaces: dict[str, int] = {}  # bytes that each pass was last given

    def __call__(self, call: Call) -> None:
        handle = ctypes.c_void_p(self.so.ae_call_new())
        try:
            for verb, name, *values in call.commands:
                self._follow(handle, call, verb, name.encode(), values)
        finally:
            self.so.ae_call_delete(handle)

    def _follow(self, handle: Any, call: Call, verb: str, name: bytes, values: list[Any]) -> None:
        def at(buffer: int, offset: int) -> ctypes.c_void_p | None:
            if buffer < 0:
                return None
            return ctypes.c_void_p(call.buffers[buffer].untyped_storage().data_ptr() + offset)

        bad = 0
        if verb == "integer":
            bad = self.so.ae_call_integer(handle, name, ctypes.c_int64(values[0]))
        elif verb == "real":
            bad = self.so.ae_call_real(handle, name, ctypes.c_double(values[0]))
        elif verb == "pointer":
            bad = self.so.ae_call_pointer(handle, name, at(*values))
        elif verb == "view":
            buffer, offset, *strides, table, kind = values
            numbers = (ctypes.c_int64 * 4)(*strides)
            bad = self.so.ae_call_view(
                handle, name, at(buffer, offset), numbers, at(table, 0), kind
            )
        else:
            size = self.so.ae_call_workspace(handle, name)
            self.workspaces[name.decode()] = size
            workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
            error = self.so.ae_call_run(handle, name, ctypes.c_void_p(workspace.data_ptr()))
            if error is not None:
                raise RuntimeError(error.decode())
        assert not bad, (verb, name)


class Replay:
    """Follows commands in a process of its own, which a sanitizer ends at the first finding."""

    def __init__(self, program: Path, seed: int = 0) -> None:
        self.program = program
        self.environment = {
            **os.environ,
            "AE_SHIM_SEED": str(seed),
            "TSAN_OPTIONS": "halt_on_error=1 report_signal_unsafe=0",
            "ASAN_OPTIONS": "detect_stack_use_after_return=0 detect_leaks=0",
        }

    def __call__(self, call: Call) -> None:
        with tempfile.TemporaryDirectory() as name:
            calls, results = Path(name) / "calls", Path(name) / "results"
            calls.write_bytes(self._text(call))
            done = subprocess.run(
                [str(self.program), str(calls), str(results)],
                capture_output=True,
                text=True,
                env=self.environment,
                timeout=600,
            )
            if done.returncode != 0:
                raise RuntimeError(f"replay: exit status {done.returncode}\n{done.stderr[-6000:]}")
            data = results.read_bytes()
        start = 0
        for x in call.buffers:
            storage = x.untyped_storage()
            ctypes.memmove(
                storage.data_ptr(), data[start : start + storage.nbytes()], storage.nbytes()
            )
            start += storage.nbytes()

    @staticmethod
    def _text(call: Call) -> bytes:
        parts = []
        for x in call.buffers:
            storage = x.untyped_storage()
            parts.append(f"buffer {storage.nbytes()}\n".encode())
            parts.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()) + b"\n")
        parts.append(b"new\n")
        for verb, name, *values in call.commands:
            words = [v.hex() if isinstance(v, float) else str(v) for v in values]
            parts.append(" ".join([verb, name, *words]).encode() + b"\n")
        return b"".join(parts)


# ---- The ops ---------------------------------------------------------------------------------


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def _heads_last(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(*, H, L, E), laid out as (*, L, H, E)."""
    *batch, heads, rows, size = shape
    return _fresh(*batch, rows, heads, size, dtype=dtype).transpose(-2, -3)


def fill(call: Call, q: Tensor, k: Tensor, v: Tensor | None, options: Mapping[str, Any]) -> None:
    """What all passes share: sizes, inputs and options, as csrc/common/make_params.cpp does."""
    batch = q.shape[:-3]
    wide = _accumulation(q.dtype)
    packed = options.get("cu_seqlens_q") is not None
    call.integer("type", TYPES[q.dtype])
    call.integer("heads", q.size(-3))
    call.integer("kv_heads", k.size(-3))
    call.integer("q_length", q.size(-2))
    call.integer("k_length", k.size(-2))
    call.integer("qk_size", q.size(-1))
    call.integer("v_size", 0 if v is None else v.size(-1))
    call.integer("problems", batch.numel())
    if packed:
        call.integer("problems", options["cu_seqlens_q"].numel() - 1)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            call.pointer(name, options[name].to(torch.int64))
    for name, x in (("query", q), ("key", k), ("value", v)):
        call.view(name, x, batch)
    call.view("attn_mask", options.get("attn_mask"), batch)
    call.view("attn_bias", options.get("attn_bias"), batch)
    key_mask = options.get("key_mask")
    if key_mask is not None:
        call.integer("key_mask_is_bool", key_mask.dtype == torch.bool)
        if key_mask.dtype != torch.bool:
            key_mask = key_mask.to(wide)
        call.view("key_mask", key_mask.unsqueeze(-2).unsqueeze(-2), batch)
    if options.get("sinks") is not None:
        call.pointer("sinks", options["sinks"].detach().to(wide).contiguous())
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        call.pointer("alibi_slopes", slopes.to(wide).contiguous())
        call.integer("alibi_stride_0", q.size(-3) if slopes.dim() > 1 else 0)
        call.integer("alibi_stride_1", 1)
    offset = options.get("query_offset", 0)
    if isinstance(offset, Tensor):
        call.pointer("query_offsets", offset.to(torch.int64).contiguous())
    else:
        call.integer("query_offset", offset)
    left, right = options.get("window") or (None, None)
    if options.get("is_causal"):
        right = 0 if right is None else min(right, 0)
    for name, bound in (("window_left", left), ("window_right", right)):
        if bound is not None:
            call.integer(name, bound)
    scale = options.get("scale")
    default = q.size(-1) ** -0.5 if q.size(-1) else 1.0
    call.real("scale", default if scale is None else scale)
    call.real("softcap", options.get("softcap", 0.0))
    threshold = round(options.get("dropout_p", 0.0) * 65536)
    if threshold:
        call.integer("dropout_threshold", threshold)
        kept = 65536 - threshold
        call.real("dropout_rescale", 65536 / kept if kept else 0.0)
        call.pointer("rng_state", options["rng_state"].contiguous())


def _bias_gradient(call: Call, bias: Tensor, batch: Sequence[int]) -> Tensor:
    grad = _fresh(*bias.shape, dtype=_accumulation(bias.dtype))
    call.view("grad_bias", grad, batch)
    leading = bias.shape[:-3] if bias.dim() > 3 else torch.Size([])
    sizes = (leading.numel(), bias.size(-3) if bias.dim() > 2 else 1, *bias.shape[-2:])
    for d, n in enumerate(sizes):
        call.integer(f"bias_size_{d}", n)
    return grad


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        device: Emulator,
        options: Mapping[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = Call()
        options = {**options, "attn_bias": bias, "sinks": sinks}
        fill(call, q, k, v, options)
        batch, rows = q.shape[:-3], q.shape[:-1]
        out = _heads_last((*rows, v.size(-1)), q.dtype)
        lost = _heads_last((*rows, v.size(-1)), q.dtype) if q.element_size() == 2 else None
        lse = _fresh(*rows, dtype=_accumulation(q.dtype))
        residual = _fresh(*rows, dtype=_accumulation(q.dtype))
        call.view("output", out, batch)
        call.view("output_residual", lost, batch)
        call.view("logsumexp", lse, batch, 2)
        call.view("residual", residual, batch, 2)
        device.run(call, "forward")
        ctx.device, ctx.options = device, options
        ctx.save_for_backward(q, k, v, bias, sinks, out, lost, lse, residual)
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        return out, lse, residual

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> Any:  # type: ignore[override]
        q, k, v, bias, sinks, out, lost, lse, residual = ctx.saved_tensors
        wanted = dict(zip("qkvbs", ctx.needs_input_grad[2:], strict=True))
        call, batch = Call(), q.shape[:-3]
        fill(call, q, k, v, ctx.options)
        call.view("output", out, batch)
        call.view("output_residual", lost, batch)
        for name, x in (("logsumexp", lse), ("residual", residual), ("grad_logsumexp", grad_lse)):
            call.view(name, x, batch, 2)
        call.view("delta", torch.full_like(lse, torch.nan), batch, 2)
        call.view("grad_output", grad_out, batch)
        grads: dict[str, Tensor | None] = dict.fromkeys("qkvbs")
        passes = ["delta"]
        for letter, name, x in (
            ("q", "grad_query", q),
            ("k", "grad_key", k),
            ("v", "grad_value", v),
        ):
            if wanted[letter] and (letter != "v" or grad_out is not None):
                grads[letter] = _heads_last(x.shape, x.dtype)
                call.view(name, grads[letter], batch)
        passes += ["keys", "queries"]
        if bias is not None and wanted["b"]:
            grads["b"] = _bias_gradient(call, bias, batch)
            passes.append("bias")
        if sinks is not None and wanted["s"]:
            grads["s"] = _fresh(q.size(-3), dtype=_accumulation(q.dtype))
            call.pointer("grad_sinks", grads["s"])
            passes.append("sinks")
        ctx.device.run(call, *passes)
        if grads["b"] is not None:
            grads["b"] = grads["b"].to(bias.dtype)
        if grads["s"] is not None:
            grads["s"] = grads["s"].to(sinks.dtype)
        return None, None, *grads.values()


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        device: Emulator,
        options: Mapping[str, Any],
        mean: bool,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        lse: Tensor,
        residual: Tensor,
    ) -> Tensor:
        call, batch = Call(), q.shape[:-3]
        options = {**options, "attn_bias": bias, "sinks": sinks}
        fill(call, q, k, None, options)
        call.view("logsumexp", lse, batch, 2)
        call.view("residual", residual, batch, 2)
        call.integer("average", mean)
        heads = 1 if mean else q.size(-3)
        weights = _fresh(*batch, heads, q.size(-2), k.size(-2), dtype=q.dtype)
        call.view("weights", weights, batch)
        device.run(call, "weights")
        ctx.device, ctx.options, ctx.mean = device, options, mean
        ctx.save_for_backward(q, k, bias, sinks, lse, residual)
        return weights.squeeze(-3) if mean else weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, bias, sinks, lse, residual = ctx.saved_tensors
        call, batch = Call(), q.shape[:-3]
        fill(call, q, k, None, ctx.options)
        call.view("logsumexp", lse, batch, 2)
        call.view("residual", residual, batch, 2)
        call.view("grad_weights", grad.unsqueeze(-3) if ctx.mean else grad, batch)
        call.real("grad_weights_scale", 1 / q.size(-3) if ctx.mean else 1.0)
        grad_q, grad_k = _heads_last(q.shape, q.dtype), _heads_last(k.shape, k.dtype)
        call.view("delta", torch.full_like(lse, torch.nan), batch, 2)
        call.view("grad_query", grad_q, batch)
        call.view("grad_key", grad_k, batch)
        grad_bias = grad_sinks = None
        passes = ["delta", "keys", "queries"]
        if bias is not None and ctx.needs_input_grad[5]:
            grad_bias = _bias_gradient(call, bias, batch)
            passes.append("bias")
        if sinks is not None and ctx.needs_input_grad[6]:
            grad_sinks = _fresh(q.size(-3), dtype=_accumulation(q.dtype))
            call.pointer("grad_sinks", grad_sinks)
            passes.append("sinks")
        ctx.device.run(call, *passes)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        return None, None, None, grad_q, grad_k, grad_bias, grad_sinks, None, None


class Emulator:
    """The ops on emulated kernels. `visited` counts the tiles of the last pass."""

    def __init__(self, follow: Callable[[Call], None], **limits: int) -> None:
        self.follow = follow
        self.limits = limits  # of the device: grid_blocks, shared_memory
        self.visited = torch.zeros(1, dtype=torch.int64)

    def run(self, call: Call, *passes: str) -> None:
        for name, value in self.limits.items():
            call.integer(name, value)
        self.visited.zero_()
        call.pointer("visited", self.visited)
        call.run(*passes)
        self.follow(call)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_weights: bool | str = False,
        **options: Any,
    ) -> Any:
        options["attn_mask"] = attn_mask
        out, lse, residual = _Attention.apply(self, options, query, key, value, attn_bias, sinks)
        results = [out]
        if return_lse:
            results.append(lse)
        if return_weights:
            mean = return_weights == "mean"
            results.append(
                _Weights.apply(self, options, mean, query, key, attn_bias, sinks, lse, residual)
            )
        return results[0] if len(results) == 1 else tuple(results)

    def varlen_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        options.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        tensors = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        if options.get("key_mask") is not None:
            options["key_mask"] = options["key_mask"].unsqueeze(0)
        out, lse, _ = _Attention.apply(self, options, *tensors, None, sinks)
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
        return (out, lse) if return_lse else out


@functools.cache
def emulator(sanitizer: str = "", seed: int = 0, **limits: int) -> Emulator:
    """The kernels of this tree: in this process, or under a sanitizer in others."""
    built = build(sanitizer)
    return Emulator(Replay(built, seed) if sanitizer else Library(built), **limits)
