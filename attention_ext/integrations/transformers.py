"""Registers the fused operator with Hugging Face transformers as an attention implementation.

Called by users (``register()`` or ``use(model)``) and by examples/. Imports transformers, which the
package needs nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import output_capturing

from attention_ext.functional import attention
from attention_ext.integrations._transformers_masks import StructuredMask, structured_mask
from attention_ext.modules import MultiheadAttention

__all__ = ["NAME", "register", "use"]

#: The name that :func:`register` registers and returns.
NAME = "attention_ext"

# Keywords that models pass along and that do not change what attention computes here: a mask, if
# one is needed, already holds what positions and caches say; the operator is deterministic always.
_NO_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)

# Keywords that mean something this adapter does not do, with what to do instead.
_ADVICE = {
    name: "packed sequences are told apart by position_ids alone: leave this keyword out"
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
}


def register() -> str:
    """Make ``attn_implementation="attention_ext"`` available to every transformers model.

    Registers the attention and its masks under one name: with the attention alone, transformers
    would silently build no mask at all. A model class that has its attention written out does not
    ask for an implementation, and transformers does not say so: :func:`use` does.

    Returns:
        The name, for ``from_pretrained(..., attn_implementation=register())``.

    Source:
        transformers' ``AttentionInterface`` and ``AttentionMaskInterface``.

    Example::

        >>> from attention_ext.integrations.transformers import register
        >>> from transformers import AutoModel, BertConfig
        >>> config = BertConfig(num_hidden_layers=1, hidden_size=48, num_attention_heads=4)
        >>> model = AutoModel.from_config(config, attn_implementation=register())
    """
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, structured_mask)
    return NAME


def use(model: nn.Module) -> int:
    """Switch a transformers model that exists to the fused operator, or say why that cannot be.

    Args:
        model: a ``PreTrainedModel``. It is changed in place; its parameters stay as they are.

    Returns:
        How many attention layers will call the operator.

    Raises:
        RuntimeError: if a layer of the model would keep its old attention, or if there is none; the
            text names the classes. The model is then as it was.

    Source:
        transformers' ``set_attn_implementation``, which warns at most.

    Example::

        >>> from attention_ext.integrations.transformers import use
        >>> from transformers import AutoModel, BertConfig
        >>> config = BertConfig(num_hidden_layers=3, hidden_size=48, num_attention_heads=4)
        >>> use(AutoModel.from_config(config))
        3
    """
    layers = [m for m in model.modules() if _is_attention(m)]
    name = type(model).__name__
    fixed = sorted({type(m).__name__ for m in layers if not _can_be_ours(m)})
    if fixed:
        raise RuntimeError(
            f"use: {name} cannot be switched as a whole, because its {', '.join(fixed)} has the "
            f"attention written out and does not ask transformers for an implementation. For "
            f"torch's MultiheadAttention call attention_ext.replace_attention(model) first; the "
            f"other layers alone are switched by model.set_attn_implementation(register())"
        )
    if not layers:
        raise RuntimeError(f"use: {name} cannot be switched to attention_ext: no attention found")
    register()
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = [config for part in parts for config in _configs(part)]
    before = [config._attn_implementation for config in configs]
    for part in parts:  # T5's encoder and decoder have copies of the configuration
        part.set_attn_implementation(NAME)
    asking = (m for m in layers if not isinstance(m, MultiheadAttention))
    kept = sorted({type(m).__name__ for m in asking if _implementation(m) != NAME})
    if kept:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        raise RuntimeError(
            f"use: {name} cannot be switched to attention_ext: transformers left {', '.join(kept)} "
            f"with another implementation"
        )
    return len(layers)


def _is_attention(module: nn.Module) -> bool:
    """True for the innermost modules that are called attention; wrappers of them do not count."""
    inner = (child for child in module.modules() if child is not module)
    return _named_attention(module) and not any(_named_attention(child) for child in inner)


def _named_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _can_be_ours(module: nn.Module) -> bool:
    """Whether it is ours, or its forward looks its attention up: what transformers checks, too."""
    if isinstance(module, MultiheadAttention):
        return True
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False


def _configs(part: Any) -> list[Any]:
    """A model's configuration and those inside it (a vision and a text tower's, say)."""
    inner = [getattr(part.config, name) for name in part.config.sub_configs]
    return [part.config, *(config for config in inner if config is not None)]


def _implementation(module: nn.Module) -> str | None:
    config = getattr(module, "config", None)
    implementation: str | None = getattr(config, "_attn_implementation", None)
    return implementation


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks: (B, H, L, E) in, (B, L, H, Ev) out, and weights if asked for.

    A mask, if there is one, says everything: then ``is_causal`` and ``sliding_window`` only repeat
    it (and some models' windows mean another library's count).
    """
    for name, given in kwargs.items():
        if given is not None and name not in _NO_EFFECT:
            _refuse(module, name)
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        options = _without_mask(query, key, bool(is_causal), sliding_window)
    elif isinstance(attention_mask, StructuredMask):
        options = _structured(attention_mask, query, key)
    else:
        options = _dense(attention_mask, query)
    if position_bias is not None:
        bias = options.get("attn_bias")
        options["attn_bias"] = position_bias if bias is None else bias + position_bias
    result = attention(
        query,
        key,
        value,
        softcap=softcap or 0.0,
        sinks=s_aux,
        scale=scaling,
        dropout_p=dropout,
        return_weights=bool(output_attentions) or _weights_are_collected(),
        **options,
    )
    out, weights = (result, None) if isinstance(result, Tensor) else result
    return out.transpose(1, 2).contiguous(), weights


def _weights_are_collected() -> bool:
    """Whether hooks of transformers wait for the weights: not every model passes the wish along.

    (GPT-2 does not.) While tracing, a collector that was set outside of the graph is out of reach.
    """
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def _refuse(module: nn.Module, name: str) -> None:
    advice = _ADVICE.get(name, "ignoring it could change the result silently")
    raise NotImplementedError(
        f"attention_ext does not honour the attention keyword {name!r} that "
        f"{type(module).__name__} passes; {advice}"
    )


def _without_mask(
    query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None
) -> dict[str, Any]:
    """What a call without a mask means.

    Without a window, what transformers' sdpa function says: one query alone sees every key; more
    of them are aligned top left. A window is flash-attn's: W keys to a side, the row's own among
    them, and the last row belongs to the last key.
    """
    rows, keys = query.size(2), key.size(2)
    if sliding_window is None:
        return {"is_causal": is_causal and rows > 1}
    right = 0 if is_causal else sliding_window - 1
    return {"window": (sliding_window - 1, right), "query_offset": keys - rows}


def _structured(mask: StructuredMask, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The parts of a mask from our own mask interface, as the operator takes them."""
    rows, keys = mask.size(2), mask.size(3)
    if rows == 1 != query.size(2) and keys == key.size(2):  # one row for all queries
        return _dense(mask.dense(), query)
    if (rows, keys) != (query.size(2), key.size(2)):
        raise RuntimeError(
            f"attention_ext: the attention mask is for {rows} queries and {keys} keys, got "
            f"{query.size(2)} and {key.size(2)}"
        )
    options: dict[str, Any] = {}
    if mask.window == (None, 0):
        options["is_causal"] = True
    elif mask.window != (None, None):
        options["window"] = mask.window
    if options:
        options["query_offset"] = mask.query_offset
    if mask.key_mask is not None:
        options["key_mask"] = mask.key_mask.expand(query.size(0), -1)
    return options


def _dense(mask: Tensor, query: Tensor) -> dict[str, Any]:
    """The option for a mask that a model or a user hands over: bool, or a float that is added."""
    if mask.dtype != torch.bool:
        return {"attn_bias": mask}
    if mask.dim() == 4 and mask.size(1) == mask.size(2) == 1:
        return {"key_mask": mask[:, 0, 0].expand(query.size(0), -1)}
    return {"attn_mask": mask}
