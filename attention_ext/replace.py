"""replace_attention: swaps torch.nn.MultiheadAttention for ours inside an existing model.

Called by users once, before training or evaluation. Imports modules only.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from attention_ext.modules import MultiheadAttention

__all__ = ["replace_attention"]

# What names a module's members: the new module needs its own, to add to.
_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def replace_attention(model: nn.Module) -> int:
    r"""Replace every :class:`torch.nn.MultiheadAttention` inside ``model``, in place.

    The new modules hold the very same parameters, buffers, submodules and hooks (so optimizers,
    tied weights and the handles of registered hooks keep working), and keep names, training mode,
    device, pruning and parametrizations. A module that is shared stays shared. Afterwards every
    attention call runs the fused operator: :class:`torch.nn.TransformerEncoderLayer` can no longer
    go around the module in evaluation, and :class:`torch.nn.TransformerEncoder` no longer turns
    padded input into nested tensors (its output keeps the padded length).

    Models may be compiled (:func:`torch.compile`), wrapped for distributed training
    (:class:`~torch.nn.parallel.DistributedDataParallel`) or adapted (LoRA) before or after. LoRA on
    ``out_proj`` alone, which torch's module reads past, has its effect.

    Subclasses are left alone, because they may compute something else; so are references to
    replaced modules that are not submodules (in plain lists or closures).

    Args:
        model: any module.

    Returns:
        How many modules were replaced; 0 is not an error.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is itself a :class:`torch.nn.MultiheadAttention`, which cannot be
            replaced in place; or the ``forward`` of an attention module was replaced or compiled by
            itself, so that the old one would go on. Nothing is replaced then.

    Example::

        >>> model = torch.nn.Transformer(64, 4, 2, 2)
        >>> attention_ext.replace_attention(model)
        6
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_attention expects a torch.nn.Module, got {type(model).__name__}")
    if _is_torch_attention(model):
        raise ValueError(
            "replace_attention swaps the submodules of a model, and this model is itself a "
            "torch.nn.MultiheadAttention. Wrap it: model = torch.nn.ModuleList([model]); "
            "replace_attention(model); model = model[0]"
        )
    for path, module in model.named_modules():
        if _is_torch_attention(module):
            _refuse_own_forward(path, module)
    replaced: dict[nn.Module, MultiheadAttention] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is None or not _is_torch_attention(child):
                continue
            if child not in replaced:
                replaced[child] = _convert(child)
            parent._modules[name] = replaced[child]
            if name == "_orig_mod" and hasattr(parent, "dynamo_ctx"):
                compiled: Any = parent
                compiled._initialize()  # torch.compile's wrapper keeps the forward of its module
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(inner, MultiheadAttention) for inner in module.modules()
        ):
            module.use_nested_tensor = False
    return len(replaced)


def _is_torch_attention(module: nn.Module) -> bool:
    return parametrize.type_before_parametrizations(module) is nn.MultiheadAttention


def _refuse_own_forward(path: str, module: nn.Module) -> None:
    """Raise if calling the module would not run its class's forward: the copy would not, either."""
    compiled = module.__dict__.get("_compiled_call_impl") is not None
    if compiled or "forward" in module.__dict__:
        raise ValueError(
            f"replace_attention: {path} was {'compiled' if compiled else 'given a forward'} by "
            "itself and would go on with its old attention. Replace first, then "
            f"{'compile it' if compiled else 'change its forward'}"
        )


def _convert(module: nn.Module) -> MultiheadAttention:
    """Make one of ours around the state of a torch module.

    The dictionaries of hooks are shared, not copied: the handles that users hold refer to them.
    """
    state = dict(module.__dict__)
    for name in _CONTAINERS:
        state[name] = state[name].copy()
    cls = _class_for(module)
    converted = cls.__new__(cls)
    converted.__setstate__(state)
    return converted


def _class_for(module: nn.Module) -> type[MultiheadAttention]:
    """Return our class, with the properties that parametrization gave the module's class."""
    if not parametrize.is_parametrized(module):
        return MultiheadAttention
    members: dict[str, Any] = dict(type(module).__dict__)
    for slot in ("__dict__", "__weakref__"):
        members.pop(slot, None)
    return type(type(module).__name__, (MultiheadAttention,), members)
