"""What docs/masks.md says of ONNX, JAX and Keras, run. Called by test_docs_masks.py, in a process
that finds them; a library that is not there fails here and is left out there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import pytest
import torch
from torch import Tensor

import mask_tables as t


def onnx(seen: Tensor | None = None, nonpad: Tensor | None = None, **attributes: Any) -> Tensor:
    """ONNX's own reference of its operator Attention."""
    from onnx import TensorProto, defs, helper
    from onnx.reference import ReferenceEvaluator

    feeds = {"q": t.QUERY.numpy(), "k": t.KEY.numpy(), "v": t.VALUE.numpy()}
    names = ["q", "k", "v", "", "", "", ""]
    if seen is not None:
        feeds["mask"], names[3] = seen.numpy(), "mask"
    if nonpad is not None:
        feeds["nonpad"], names[6] = nonpad.numpy(), "nonpad"
    node = helper.make_node("Attention", names, ["out"], **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opset = helper.make_opsetid("", defs.onnx_opset_version())
    return torch.from_numpy(
        ReferenceEvaluator(helper.make_model(graph, opset_imports=[opset])).run(None, feeds)[0]
    )


def jax(seen: Tensor | None = None, lengths: Tensor | None = None, **options: Any) -> Tensor:
    from jax import numpy
    from jax.nn import dot_product_attention

    q, k, v = (numpy.array(x.transpose(1, 2).numpy()) for x in (t.QUERY, t.KEY, t.VALUE))
    if seen is not None:
        options["mask"] = numpy.array(seen.numpy())[None, None]
    if lengths is not None:
        options["key_value_seq_lengths"] = numpy.array(lengths.int().numpy())
    return torch.from_numpy(np.array(dot_product_attention(q, k, v, **options))).transpose(1, 2)


def keras(seen: Tensor | None = None, causal: bool = False, **options: Any) -> Tensor:
    """Keras' layer, with projections that change nothing."""
    import keras

    size = t.H * t.E
    layer = keras.layers.MultiHeadAttention(t.H, t.E, use_bias=False, **options)
    layer.build((t.B, t.L, size), (t.B, t.S, size), (t.B, t.S, size))
    same = np.eye(size, dtype="float32")
    layer.set_weights([*[same.reshape(size, t.H, t.E)] * 3, same.reshape(t.H, t.E, size)])
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (t.QUERY, t.KEY, t.VALUE))
    mask = None if seen is None else seen.expand(t.B, -1, -1)
    out = layer(q, v, k, attention_mask=mask, use_causal_mask=causal)
    return out.detach().unflatten(-1, (t.H, t.E)).transpose(1, 2)


def keras_function(seen: Tensor | None = None, causal: bool = False) -> Tensor:
    from keras import ops

    q, k, v = (x.transpose(1, 2) for x in (t.QUERY, t.KEY, t.VALUE))
    mask = None if seen is None else seen.expand(t.B, 1, -1, -1)
    return ops.dot_product_attention(q, k, v, mask=mask, is_causal=causal).transpose(1, 2)


W, l, r, n = (t.LETTERS[letter] for letter in "Wlrn")
KERAS = "Keras `ops.dot_product_attention`, `MultiHeadAttention`"
LIBRARIES: list[tuple[str, Callable[..., Tensor], Callable[[], Tensor]]] = [
    ("ONNX `Attention`", onnx, lambda: onnx(is_causal=1)),
    ("`jax.nn.dot_product_attention`", jax, lambda: jax(is_causal=True)),
    (KERAS, keras, lambda: keras(causal=True)),
    (KERAS, keras_function, lambda: keras_function(causal=True)),
]
CALLS: dict[str, Callable[[], Tensor]] = {
    "ONNX: `is_causal=1`": lambda: onnx(is_causal=1),
    "ONNX: `left_window_size=l, right_window_size=r`": lambda: onnx(
        left_window_size=l, right_window_size=r
    ),
    "ONNX: `is_causal=1, nonpad_kv_seqlen=n`": lambda: onnx(is_causal=1, nonpad=n),
    "JAX: `is_causal=True`": lambda: jax(is_causal=True),
    "JAX: `local_window_size=(l, r)`": lambda: jax(local_window_size=(l, r)),
    "JAX: `local_window_size=W`": lambda: jax(local_window_size=W),
    "JAX: `key_value_seq_lengths=n`": lambda: jax(lengths=n),
    "Keras: `use_causal_mask=True`": lambda: keras(causal=True),
    "Keras, causal: `sliding_window=W`": lambda: keras(causal=True, sliding_window=W),
    "Keras, to both sides: `sliding_window=W`": lambda: keras(sliding_window=W),
}


@pytest.mark.parametrize(
    ("row", "attend", "causal"), LIBRARIES, ids=["onnx", "jax", "keras", "keras_function"]
)
def test_library_does_what_the_table_says(
    row: str, attend: Callable[..., Tensor], causal: Callable[[], Tensor]
) -> None:
    _, true, _, corner, dead = t.CONVENTIONS[row]
    assert true == t.polarity(attend)
    assert corner.startswith(t.alignment(causal()))
    assert dead.startswith(t.dead_row(attend))


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.split(":")[0].split(",")[0].lower())
def test_call_is_the_one_beside_it(row: str) -> None:
    torch.testing.assert_close(t.spelled_here(row), CALLS[row](), atol=1e-5, rtol=1e-5)
