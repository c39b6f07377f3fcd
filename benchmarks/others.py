"""The work of rows that compare with other libraries: ONNX Runtime, compiled FlexAttention, JAX.

Each is optional: without the library its rows say so and the others run. All of them get two
threads, contiguous inputs in the layout they like best, and the same numbers as ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import attention_ext as ae
from benchmarks.work import Attention, Call, Prepared
from cases import Case

# Other thread pools keep spinning for a while after a call, on the cores that the next call needs.
SETTLE = 10e-3

Kind = Literal["full", "causal", "window"]
WINDOW = (127, 0)


def _case(kind: Kind, length: int) -> Case:
    options: dict[Kind, dict[str, Any]] = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"window": WINDOW},
    }
    return Case(f"{kind} {length}", length, length, 64, batch=(2,), heads=8, **options[kind])


def _inputs(kind: Kind, length: int) -> tuple[tuple[Tensor, ...], Call, float]:
    case = _case(kind, length)
    args, kwargs = case.make(torch.float32)

    def ours() -> object:
        with torch.no_grad():
            return ae.attention(*args, **kwargs)

    return args, ours, Attention(case).flops(kwargs)


@dataclass(frozen=True)
class OnnxRuntime:
    """com.microsoft.MultiHeadAttention, float32, on (B, L, H * E) rows."""

    length: int = 1024
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper

        args, ours, flops = _inputs("full", self.length)
        batch, heads, length, size = args[0].shape
        shape = [batch, length, heads * size]
        names = ["query", "key", "value"]
        node = helper.make_node(
            "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=heads
        )
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in names]
        result = helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)
        graph = helper.make_graph([node], "attention", given, [result])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        onnx.checker.check_model(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        rows = [x.transpose(1, 2).reshape(shape).contiguous() for x in args]
        feed = {name: x.numpy() for name, x in zip(names, rows, strict=True)}

        def theirs() -> object:
            out = torch.from_numpy(session.run(None, feed)[0])
            return out.view(batch, length, heads, size).transpose(1, 2)

        return Prepared(ours, {"MultiHeadAttention": theirs}, flops, settle=SETTLE)


@dataclass(frozen=True)
class FlexAttention:
    """torch.compile(flex_attention), with the block mask made in advance."""

    kind: Kind
    length: int
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        args, ours, flops = _inputs(self.kind, self.length)

        def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j <= WINDOW[0])

        mask = None
        if self.kind != "full":
            rule = causal if self.kind == "causal" else window
            mask = create_block_mask(rule, None, None, self.length, self.length, device="cpu")
        compiled: Any = torch.compile(flex_attention, fullgraph=True)

        def theirs() -> object:
            with torch.no_grad():
                return compiled(*args, block_mask=mask)

        return Prepared(ours, {"flex_attention": theirs}, flops)


@dataclass(frozen=True)
class JaxAttention:
    """jax.jit(jax.nn.dot_product_attention), float32, on (B, L, H, E)."""

    length: int = 1024
    dtype: torch.dtype = torch.float32

    def prepare(self) -> Prepared:
        import jax
        import numpy

        args, ours, flops = _inputs("full", self.length)
        arrays = [jax.numpy.asarray(x.transpose(1, 2).contiguous().numpy()) for x in args]
        function = jax.jit(jax.nn.dot_product_attention)

        def theirs() -> object:
            return jax.block_until_ready(function(*arrays))

        def comparable() -> Tensor:
            return torch.from_numpy(numpy.array(theirs())).transpose(1, 2)

        return Prepared(
            ours, {"dot_product_attention": theirs}, flops, check=comparable, settle=SETTLE
        )
