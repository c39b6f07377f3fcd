"""Calls of the module and the functions for tests/test_cpp_library.py.

Each as tests/cpp/library_cases.cpp reads it, and what the Python API makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention_ext as ae


@dataclass
class ModuleCase:
    """One call of the module, in training unless `training` is False."""

    options: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    need_weights: bool = True
    average_attn_weights: bool = True
    is_causal: bool = False
    inputs: str = "qkv"  # which of the inputs are tensors of their own: "q", "qk" or "qkv"
    dtype: torch.dtype = torch.float32
    training: bool = True
    batched: bool = True
    clone: bool = False


N, L, S, E, H = 3, 21, 37, 24, 4


def bools(*shape: int, hidden: float = 0.4) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < hidden


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


def dead_rows() -> Tensor:
    mask = bools(L, S)
    mask[3] = True
    mask[17] = True
    return mask


def with_infinities(*shape: int) -> Tensor:
    return floats(*shape).masked_fill(bools(*shape), -torch.inf)


def some_dead(mask: Tensor) -> Tensor:
    mask[1] = True
    return mask


MODULE_CASES: dict[str, ModuleCase] = {
    "plain": ModuleCase(),
    "self_attention": ModuleCase(inputs="q", is_causal=True),
    "one_key_and_value": ModuleCase(inputs="qk", need_weights=False),
    "float64": ModuleCase(dtype=torch.float64, masks={"attn_mask": dead_rows()}),
    "bfloat16": ModuleCase(dtype=torch.bfloat16, masks={"attn_mask": floats(L, S)}),
    "dead_rows": ModuleCase(masks={"attn_mask": dead_rows()}, average_attn_weights=False),
    "dead_sequence": ModuleCase(masks={"key_padding_mask": some_dead(bools(N, S))}),
    "mask_per_head": ModuleCase(masks={"attn_mask": bools(N * H, L, S)}, need_weights=False),
    "bias_per_head": ModuleCase(masks={"attn_mask": with_infinities(N * H, L, S)}),
    "expanded_mask": ModuleCase(masks={"attn_mask": bools(1, 1, S).expand(N * H, L, S)}),
    "float_padding": ModuleCase(masks={"key_padding_mask": with_infinities(N, S)}),
    "lowest_float64_padding": ModuleCase(
        masks={
            "key_padding_mask": bools(N, S) * torch.finfo(torch.float64).min,
            "attn_mask": floats(L, S),
        }
    ),
    "causal_and_padding": ModuleCase(
        masks={"key_padding_mask": bools(N, S)}, is_causal=True, options={"batch_first": True}
    ),
    "a_mask_wins_over_causal": ModuleCase(masks={"attn_mask": bools(L, S)}, is_causal=True),
    "unbatched": ModuleCase(batched=False, masks={"key_padding_mask": bools(S)}),
    "evaluation": ModuleCase(training=False, options={"dropout": 0.5}),
    "dropout": ModuleCase(options={"dropout": 0.3}, masks={"attn_mask": dead_rows()}),
    "no_bias": ModuleCase(options={"bias": False}),
    "other_sizes": ModuleCase(options={"kdim": 10, "vdim": 14, "batch_first": True}),
    "grouped_heads": ModuleCase(options={"num_kv_heads": 2}, inputs="q"),
    "grouped_other_sizes": ModuleCase(options={"num_kv_heads": 1, "kdim": 10, "add_bias_kv": True}),
    "appended": ModuleCase(
        options={"add_bias_kv": True, "add_zero_attn": True}, masks={"attn_mask": dead_rows()}
    ),
    "appended_causal": ModuleCase(
        options={"add_bias_kv": True, "window": (5, None)},
        masks={"key_padding_mask": bools(N, S)},
        is_causal=True,
    ),
    "appended_window_and_mask": ModuleCase(
        options={"add_zero_attn": True, "window": (5, 2)}, masks={"attn_mask": bools(L, S)}
    ),
    "appended_window_and_bias": ModuleCase(
        options={"add_zero_attn": True, "window": (None, 2)}, masks={"attn_mask": floats(L, S)}
    ),
    "everything": ModuleCase(
        options={"window": (9, 3), "softcap": 2.0, "sinks": True, "alibi": True, "num_kv_heads": 2},
        masks={"key_padding_mask": bools(N, S), "attn_mask": floats(L, S)},
        average_attn_weights=False,
    ),
    "alibi_of_six_heads": ModuleCase(options={"alibi": True, "num_heads": 6}),
    "clone": ModuleCase(options={"sinks": True, "add_bias_kv": True}, clone=True),
}


def module_inputs(case: ModuleCase) -> dict[str, Tensor]:
    torch.manual_seed(3)
    k_size, v_size = case.options.get("kdim", E), case.options.get("vdim", E)
    shapes = {"query": (L, N, E), "key": (S, N, k_size), "value": (S, N, v_size)}
    if case.inputs == "q":
        shapes["query"] = (S, N, E)
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    if case.options.get("batch_first"):
        inputs = {name: x.transpose(0, 1).contiguous() for name, x in inputs.items()}
    if not case.batched:
        inputs = {name: x[:, 0].contiguous() for name, x in inputs.items()}
    if case.inputs != "qkv":
        inputs["value"] = inputs["key"]
    if case.inputs == "q":
        inputs["query"] = inputs["key"]
    memo: dict[int, Tensor] = {}
    for name, x in inputs.items():
        inputs[name] = memo.setdefault(id(x), x.to(case.dtype))
    for name, mask in case.masks.items():
        narrow = mask.is_floating_point() and mask.dtype != torch.float64
        inputs[name] = mask.to(case.dtype) if narrow else mask
    return inputs


def python_module(
    case: ModuleCase, inputs: dict[str, Tensor], file: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The case as the program reads it, and what must come out."""
    options = {"embed_dim": E, "num_heads": H, **case.options}
    torch.manual_seed(5)
    module = ae.MultiheadAttention(**options).to(case.dtype).train(case.training)
    for parameter in module.parameters():  # no bias stays 0
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(dict(module.state_dict()), file)

    wants_grad = [name for name, x in inputs.items() if x.is_floating_point()]
    wants_grad = [
        n for n in wants_grad if not (n == "key_padding_mask" and case.need_weights is None)
    ]
    memo: dict[int, Tensor] = {}
    leaves = {}
    for name, x in inputs.items():
        leaf = memo.setdefault(id(x), x.detach().clone())
        leaves[name] = leaf.requires_grad_() if name in wants_grad else leaf
    torch.manual_seed(11)
    output, weights = module(
        **leaves,
        need_weights=case.need_weights,
        average_attn_weights=case.average_attn_weights,
        is_causal=case.is_causal,
    )
    torch.manual_seed(13)
    grad_output = torch.randn_like(output)
    loss = (output * grad_output).sum()
    result = {"output": output}
    entry: dict[str, Any] = {"grad_output": grad_output}
    if weights is not None:
        entry["grad_weights"] = torch.randn_like(weights)
        loss = loss + (weights * entry["grad_weights"]).sum()
        result["weights"] = weights
    loss.backward()
    for name in wants_grad:
        grad = leaves[name].grad
        assert grad is not None
        result[f"grad.{name}"] = grad
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        result[f"grad.{name}"] = parameter.grad
        result[f"parameter.{name}"] = parameter
    entry |= {
        "kind": "module",
        "options": options,
        "weights_file": str(file),
        "call_seed": 11,
        "dtype_of": torch.zeros(1, dtype=case.dtype),
        "wants_grad": wants_grad,
        **inputs,
        "need_weights": case.need_weights,
        "is_causal": case.is_causal,
        "average_attn_weights": case.average_attn_weights,
        "training": case.training,
        "clone": case.clone,
    }
    return entry, {name: x.detach() for name, x in result.items()}


FUNCTION_CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bool_mask": {"attn_mask": ~dead_rows(), "average_heads": False},
    "float_mask_is_a_bias": {"attn_mask": with_infinities(L, S), "average_heads": True},
    "causal_window": {"is_causal": True, "window": (9, None), "query_offset": S - L},
    "two_sided_window": {"window": [4, 3], "scale": 0.7, "softcap": 3.0},
    "padding": {"key_mask": ~bools(N, S), "sinks": floats(H), "average_heads": True},
    "offsets_and_slopes": {
        "query_offsets": torch.tensor([0, 5, -3]),
        "alibi_slopes": floats(N, H).abs(),
        "attn_bias": floats(N, 1, L, S),
        "is_causal": True,
        "average_heads": False,
    },
    "given_random_state": {"dropout_p": 0.4, "rng_state": torch.tensor([5, 6, 0, 0, 0, 0])},
    "packed": {
        "cu_seqlens_q": torch.tensor([0, 7, 7, L]),
        "cu_seqlens_k": torch.tensor([0, 9, 20, S]),
        "is_causal": True,
        "key_mask": ~bools(S),
        "sinks": floats(H),
    },
}


def python_function(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    torch.manual_seed(4)
    packed = "cu_seqlens_q" in options
    shapes = {"query": (L, H, 8), "key": (S, 2, 8), "value": (S, 2, 12)}
    tensors = {name: torch.randn(s if packed else (N, *s)) for name, s in shapes.items()}
    if not packed:
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
    tensors |= {name: x for name, x in options.items() if isinstance(x, Tensor)}
    differentiable = ("query", "key", "value", "attn_bias", "sinks", "attn_mask")
    wants_grad = [
        name for name, x in tensors.items() if name in differentiable and x.is_floating_point()
    ]
    leaves = {
        name: x.detach().clone().requires_grad_(name in wants_grad) for name, x in tensors.items()
    }
    arguments = {**options, **leaves}
    arguments["query_offset"] = arguments.pop("query_offsets", arguments.get("query_offset", 0))
    average = arguments.pop("average_heads", None)
    if packed:
        outputs = ae.varlen_attention(**arguments, return_lse=True)
        result = dict(zip(("output", "logsumexp"), outputs, strict=True))
    elif average is None:
        result = {"output": ae.attention(**arguments)}  # type: ignore[dict-item]
    else:
        outputs = ae.attention(
            **arguments, return_lse=True, return_weights="mean" if average else True
        )
        result = dict(zip(("output", "logsumexp", "weights"), outputs, strict=True))
    entry: dict[str, Any] = {"kind": "function", "wants_grad": wants_grad, **options, **tensors}
    loss = torch.zeros(())
    for name, x in result.items():
        entry[f"grad_{name}"] = torch.randn_like(x)
        if name == "logsumexp":  # -inf of a row without keys, which has no gradient
            entry[f"grad_{name}"] = entry[f"grad_{name}"].masked_fill(x.isinf(), 0.0)
        if not (name == "logsumexp" and x.isinf().any()):
            loss = loss + (x * entry[f"grad_{name}"]).sum()
        else:
            del entry[f"grad_{name}"]
    loss.backward()
    for name in wants_grad:
        grad = leaves[name].grad
        assert grad is not None
        result[f"grad.{name}"] = grad
    return entry, {name: x.detach() for name, x in result.items()}
