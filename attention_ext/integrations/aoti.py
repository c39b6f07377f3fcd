"""Models for AOTInductor: what a package cannot say about the operator, said another way."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from attention_ext import _ops

__all__ = ["prepare"]


def prepare(program: ExportedProgram) -> ExportedProgram:
    """Make an exported program that calls attention ready for ``aoti_compile_and_package``.

    For float32 and float64 the operator's fourth output is undefined, which the file format of
    AOTInductor's packages cannot express: compiling ends in an AssertionError. Such calls become
    calls of an operator that leaves this output out. It serves the backward pass only.

    Args:
        program: from :func:`torch.export.export`; changed in place.

    Returns:
        ``program``

    Source:
        ``_attention_without_output_residual`` in csrc/ops/attention.cpp.

    Example::

        >>> import torch, attention_ext as ae
        >>> from attention_ext.integrations import aoti
        >>> x = torch.randn(2, 10, 64)
        >>> model = ae.MultiheadAttention(64, 4, batch_first=True).eval()
        >>> with torch.no_grad():
        ...     program = aoti.prepare(torch.export.export(model, (x, x, x)))
        >>> path = torch._inductor.aoti_compile_and_package(program)  # doctest: +SKIP
    """
    for node in program.graph.nodes:
        if node.target is not _ops.attention or node.meta["val"][3] is not None:
            continue
        for user in list(node.users):
            if user.args[1] == 3:  # never read: there is nothing in it
                program.graph.erase_node(user)
        node.target = torch.ops.attention_ext._attention_without_output_residual.default
        node.meta["val"] = node.meta["val"][:3]
    program.graph_module.recompile()
    return program
