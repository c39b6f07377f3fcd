"""The Python side of train_step.cpp.

train_step.py prepare FOLDER    saves the weights and the batch that the program reads
train_step.py compare FOLDER    trains the same step here and compares every number of the program's
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import attention_ext as ae


def make_module() -> ae.MultiheadAttention:
    """The module of train_step.cpp, with its own weights."""
    torch.manual_seed(1)
    return ae.MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2, sinks=True)


def prepare(folder: Path) -> None:
    """Write weights.pt and batch.pt: tensors in plain dicts, which C++ can read."""
    folder.mkdir(parents=True, exist_ok=True)
    module = make_module()
    torch.save(dict(module.state_dict()), folder / "weights.pt")
    torch.manual_seed(2)
    # Sequence 1 begins with padding: under the causal mask its first rows see no key at all.
    padding = torch.zeros(3, 24, dtype=torch.bool)
    padding[1, :5] = True
    padding[2, 17:] = True
    batch = {"x": torch.randn(3, 24, 32), "target": torch.randn(3, 24, 32), "padding": padding}
    torch.save(batch, folder / "batch.pt")


def expected_numbers(folder: Path) -> dict[str, Tensor]:
    """What the program must have saved, from the Python module."""
    module = make_module()
    batch = torch.load(folder / "batch.pt")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = batch["x"]
    output, weights = module(x, x, x, batch["padding"], is_causal=True)
    loss = torch.nn.functional.mse_loss(output, batch["target"])
    loss.backward()
    numbers = {"output": output.detach(), "weights": weights.detach(), "loss": loss.detach()}
    numbers |= {f"grad.{name}": p.grad for name, p in module.named_parameters()}
    optimizer.step()
    return numbers | {f"after.{name}": p.detach() for name, p in module.named_parameters()}


def load_numbers(folder: Path) -> dict[str, Tensor]:
    """What the program saved. C++ marks its dicts with a type, which weights_only refuses."""
    numbers: dict[str, Tensor] = torch.load(folder / "numbers.pt", weights_only=False)
    return numbers


def compare(folder: Path) -> None:
    """Print the largest difference of every number."""
    program = load_numbers(folder)
    for name, number in expected_numbers(folder).items():
        print(f"{name:<22} {(program[name] - number).abs().max().item():.1e}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("prepare", "compare"):
        sys.exit(__doc__)
    {"prepare": prepare, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
