"""sdpa: makes torch.nn.functional.scaled_dot_product_attention run our operator.

Used by users and by integrations/flash_impl.py. It replaces torch's kernels of that one operator in
the dispatcher, so that every caller is served, in Python and in C++, whatever name it imported.
Imports functional only; nothing happens before a user asks.
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention_ext.functional import scaled_dot_product_attention

__all__ = ["sdpa"]

_OPERATOR = "aten::scaled_dot_product_attention"

# Where torch has kernels of the operator: its formula, vmap's two copies of the formula, and the
# casts of autocast, which would cast a mask along (finfo.min of float32 becomes -inf in 16 bits);
# our operator has autocast and vmap rules of its own.
_KEYS = (
    "CompositeImplicitAutograd",
    "FuncTorchBatchedDecomposition",
    "FuncTorchVmapMode",
    "AutocastCPU",
    "AutocastCUDA",
)

_DEVICES = ("cpu", "cuda", "meta")  # meta: shapes only


class sdpa:
    r"""Run every ``torch.nn.functional.scaled_dot_product_attention`` on the fused operator.

    ::

        with attention_ext.sdpa():
            model(x).sum().backward()

    Inside, every call on CPU and CUDA tensors is served, from Python and from C++, on every thread
    of the process: with dropout, with a mask that requires grad, with any leading dimensions, with
    ``Ev != E``, with ``enable_gqa``, under :func:`torch.nn.attention.sdpa_kernel` (which chooses
    among torch's backends and has no say here), for jagged nested tensors and
    :class:`torch.nn.attention.bias.CausalBias` masks. Meaning and errors are torch's: True takes
    part, ``is_causal`` is aligned top left, heads group only with ``enable_gqa``. (``is_causal``
    beside a mask, which torch computes or refuses depending on the backend, means both.) What
    cannot be honoured raises; nothing falls back to torch. Other functions, such as
    ``flex_attention``, are not touched.

    **Process-wide.** Contexts nest and are counted over all threads: torch's own attention is back,
    bit for bit, when the last one ends, also after an exception. ``enable()`` is the same as
    entering and ``disable()`` as leaving, for programs without a block to indent. A forked child
    keeps what was active and may end it for itself.

    While active, the fast path of :class:`torch.nn.TransformerEncoderLayer` and
    :class:`torch.nn.MultiheadAttention` (:mod:`torch.backends.mha`), which computes attention by
    other means, is off. ``MultiheadAttention`` with ``need_weights=True`` computes weights by
    itself, too: :func:`replace_attention` serves that.

    **torch.compile.** May be entered outside of a compiled function or inside (then it holds for
    the code in the block only). Compiled code cannot change its attention, so at the first entry
    and the last exit :func:`torch.compiler.reset` drops what was compiled: enter once around a loop
    rather than inside it. What was compiled ahead of time (AOTInductor) or captured in a CUDA graph
    keeps what it has. :func:`torch.export.export` inside keeps the name of torch's operator, which
    then obeys the context at run time; a context inside the exported function is exported.

    Raises:
        RuntimeError: ``disable()`` without ``enable()``; and, from the calls inside, for wrong
            arguments, devices other than CPU and CUDA, and strided nested tensors.

    Example::

        >>> import torch, attention_ext as ae
        >>> x = torch.randn(2, 4, 10, 16)
        >>> with ae.sdpa():
        ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    """

    def __enter__(self) -> sdpa:
        if torch.compiler.is_dynamo_compiling():  # a constant to the tracer, which sees this alone
            torch._C._push_on_torch_function_stack(_MODE)  # type: ignore[attr-defined]
        else:
            _enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch._C._pop_torch_function_stack()
        else:
            _exit()

    @staticmethod
    def enable() -> None:
        """Enter, until :meth:`disable`."""
        _STATE.acquire()

    @staticmethod
    def disable() -> None:
        """Undo one :meth:`enable`."""
        _STATE.release()

    @staticmethod
    def is_enabled() -> bool:
        """True while at least one context or ``enable()`` of any thread is active."""
        return _STATE.count > 0


class _Mode(TorchFunctionMode):
    """The same for code that is being traced: our operator gets into the graph by its own name."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._nn.scaled_dot_product_attention:
            return _as_torch(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_MODE = _Mode()


class _State:
    """How many want it, and how to put torch's own back."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.installed = ExitStack()

    def acquire(self) -> None:
        with self.lock:
            if self.count == 0:
                self.installed = _install()
            self.count += 1

    def release(self) -> None:
        with self.lock:
            if self.count == 0:
                raise RuntimeError("attention_ext.sdpa: disable() must follow an enable()")
            self.count -= 1
            if self.count == 0:
                self.installed.close()


_STATE = _State()


# No child is born with another thread's half-finished change, or with a lock nobody can release.
os.register_at_fork(
    before=_STATE.lock.acquire,
    after_in_parent=_STATE.lock.release,
    after_in_child=_STATE.lock.release,
)


class _Entered(threading.local):
    """Of each thread's open contexts: True for those that an export sees."""

    def __init__(self) -> None:
        self.exported: list[bool] = []


_ENTERED = _Entered()


def _enter() -> None:
    exporting = torch.compiler.is_exporting()
    if exporting:  # export keeps torch's operator as it is: only a mode gets ours into the graph
        _MODE.__enter__()  # type: ignore[no-untyped-call]
    else:
        _STATE.acquire()
    _ENTERED.exported.append(exporting)


def _exit() -> None:
    if _ENTERED.exported.pop():
        _MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    else:
        _STATE.release()


def _as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Ours, where ours allows more than torch as strict as torch."""
    if query.device.type not in _DEVICES:
        raise RuntimeError(
            "scaled_dot_product_attention inside attention_ext.sdpa: tensors must be on a CPU or "
            f"CUDA device, got {query.device}"
        )
    if not enable_gqa and query.dim() > 2 and key.dim() > 2 and value.dim() > 2:
        heads = [x.size(-3) for x in (query, key, value) if x.size(-3) != 1]
        if any(n != heads[0] for n in heads):
            raise RuntimeError(
                "scaled_dot_product_attention: query, key and value must have the same number of "
                f"heads unless enable_gqa=True, got shapes {list(query.shape)}, "
                f"{list(key.shape)} and {list(value.shape)}"
            )
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def _causal_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In place of CausalBias._dispatch, which calls torch's flash operator directly on CUDA."""
    if is_causal:
        raise ValueError("CausalBias should not be used with causal=True")
    return _as_torch(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _install() -> ExitStack:
    """Puts ours in; closing the result puts back what was there. All or nothing."""
    with ExitStack() as undo:
        replace_kernels(undo, [(_OPERATOR, key, _as_torch) for key in _KEYS])
        _replace_jagged(undo)
        from torch.nn.attention.bias import CausalBias  # imports the compiler: a second, once

        _set(undo, CausalBias, "_dispatch", staticmethod(_causal_bias))
        _set(undo, torch.backends.mha, "_is_fastpath_enabled", False)
        _separate_compiled_code(undo)
        return undo.pop_all()
    raise AssertionError("unreachable")


def replace_kernels(undo: ExitStack, kernels: list[tuple[str, str, Any]]) -> None:
    """Registers (operator, dispatch key, function), for each, until undone."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "(?s).*overrid", UserWarning
        )  # it is what we are here for
        for name, key, function in kernels:
            library.impl(name, function, key)  # type: ignore[no-untyped-call]


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute; undoing leaves alone what somebody else has put there meanwhile."""
    before = vars(owner)[name]

    def restore() -> None:
        if vars(owner)[name] is value:
            setattr(owner, name, before)

    setattr(owner, name, value)
    undo.callback(restore)


def _replace_jagged(undo: ExitStack) -> None:
    """Jagged tensors reach no dispatcher: their class picks a kernel before."""
    import torch.nested._internal.ops

    ops: Any = torch.nested._internal.ops
    torchs = ops.jagged_scaled_dot_product_attention

    def jagged(query: Any, *args: Any, **kwargs: Any) -> Any:
        if query.is_nested and query._ragged_idx == 1 and query.dim() > 3:
            return torchs(query, *args, **kwargs)  # dense planes: it calls the function again
        return _as_torch(query, *args, **kwargs)

    _set(undo, ops, "jagged_scaled_dot_product_attention", jagged)


def _separate_compiled_code(undo: ExitStack) -> None:
    """Lets no compiled code of one state run in the other, from memory or from caches on disk.

    Guards do not see the dispatcher, so everything compiled is dropped, and again when undone. On
    disk, a cached graph is found by torch's name of the operator, whatever that meant then.
    """
    config: Any = torch.compiler.config
    before = config.cache_key_tag
    config.cache_key_tag = ours = f"{before}+attention_ext.sdpa"

    def restore() -> None:
        if config.cache_key_tag == ours:
            config.cache_key_tag = before
        torch.compiler.reset()  # type: ignore[no-untyped-call]

    undo.callback(restore)
    torch.compiler.reset()  # type: ignore[no-untyped-call]
