"""Trains a model one step by its library's own attention and by ours, and compares everything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from watch import Watch


def make(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64 without dropout whose every parameter is random.

    Zeros and tiny scales, as models have them at first, would hide errors.
    """
    torch.manual_seed(3)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter, std=0.3)
    return model


def step(model: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """The outputs and the gradient of every parameter that gets one."""
    model.zero_grad()
    outputs = call(model)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    torch.stack([x.sin().sum() for x in outputs]).sum().backward()
    results = {f"output {n}": x.detach() for n, x in enumerate(outputs)}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**results, **gradients}


def compare(
    own: nn.Module,
    ours: nn.Module,
    call: Callable[[nn.Module], Any],
    calls: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    learned: str = "",
) -> None:
    """`ours`, inside `context`, calls our operator so often and gives the numbers of `own`.

    Attention by other means, a softmax included, must not be left; parameters named like `learned`
    (biases of the scores) must exist and get gradients that are not zero.
    """
    with Watch() as before:
        expected = step(own, call)
    assert before.ours == 0 and before.other_ways
    with context(), Watch() as seen:
        results = step(ours, call)
    assert seen.ours == calls
    assert seen.other_ways == []
    assert list(results) == list(expected)
    # Some gradients are zero but for rounding (of a bias that is equal for all keys, for example).
    scale = max(float(x.abs().max()) for x in expected.values())
    for name, right in expected.items():
        torch.testing.assert_close(results[name], right, rtol=1e-8, atol=1e-12 * scale, msg=name)
    if learned:
        biases = [name for name in expected if learned in name]
        assert biases
        assert all(float(expected[name].abs().max()) > 1e-6 * scale for name in biases)
    ours.eval()
    own.eval()
    with torch.no_grad():
        right = call(own)
        with context(), Watch() as seen:
            torch.testing.assert_close(call(ours), right)
    assert seen.ours == calls and seen.other_ways == []
