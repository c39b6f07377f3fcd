"""The two tables of docs/masks.md, and what a library's attention is seen to do beside them.

Used by test_docs_masks.py and libraries/mask_conventions.py. A library is a function of a bool mask
or of options that returns (B, H, L, E) for QUERY, KEY and VALUE; what it does is found by comparing
with the dense reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention_ext as ae
from attention_ext import reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "masks.md"

B, H, L, S, E = 2, 2, 4, 7, 8
_random = torch.Generator().manual_seed(5)
QUERY, KEY, VALUE = (torch.randn(B, H, n, E, generator=_random) for n in (L, S, S))
SEEN = torch.rand(L, S, generator=_random) < 0.6  # True = takes part; every row sees some key
SEEN[:, 0] = True
DEAD = 1  # the row that sees no key in the tests of such rows
PADDING = torch.arange(S) >= torch.tensor([[5], [7]])  # True = hidden
# What the letters of the second table stand for here; `hidden` and `padding` are masks.
LETTERS: dict[str, Any] = {
    "torch": torch, "L": L, "S": S, "W": 3, "l": 2, "r": 1, "n": torch.tensor([5, 7]),
    "hidden": ~SEEN, "padding": PADDING,
}  # fmt: skip


def table(header: str) -> dict[str, list[str]]:
    """The table whose head begins so: each row's other cells by its first."""
    lines = iter(PAGE.read_text().splitlines())
    assert any(line.startswith(header) for line in lines), header
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        found[cells[0].strip("*")] = cells[1:]
    return found


CONVENTIONS = table("| | query | bool mask: True means |")
SPELLINGS = table("| elsewhere | here |")


def spelled_here(row: str, q: Tensor = QUERY, k: Tensor = KEY, v: Tensor = VALUE) -> Tensor:
    """Our output for the arguments in the second column of a row."""
    (here,) = SPELLINGS[row]
    letters = LETTERS | {"L": q.size(-2), "S": k.size(-2)}
    return ae.attention(q, k, v, **eval(f"dict({here.strip('`')})", letters))


def polarity(attend: Callable[[Tensor], Tensor]) -> str:
    """What True means to a function of a bool mask (L, S)."""
    out = attend(SEEN)
    found = []
    for name, mask in (("takes part", SEEN), ("hidden", ~SEEN)):
        rows = mask.any(-1)
        right = reference.attention(QUERY, KEY, VALUE, mask)
        if torch.allclose(out[..., rows, :], right[..., rows, :], atol=1e-5):
            found.append(name)
    assert len(found) == 1, found
    return found[0]


def alignment(out: Tensor) -> str:
    """Where the corner of a causal mask lies."""
    for name, offset in (("top left", 0), ("bottom right", S - L)):
        right = reference.attention(QUERY, KEY, VALUE, is_causal=True, query_offset=offset)
        if torch.allclose(out, right, atol=1e-5):
            return name
    raise AssertionError("causal by no alignment that the page knows")


def dead_row(attend: Callable[[Tensor], Tensor]) -> str:
    """What a row without any key gives; `attend` takes a mask in which True takes part."""
    seen = SEEN.clone()
    seen[DEAD] = False
    out = attend(seen)
    right = reference.attention(QUERY, KEY, VALUE, seen)
    others = [row for row in range(L) if row != DEAD]
    torch.testing.assert_close(out[..., others, :], right[..., others, :], atol=1e-5, rtol=1e-5)
    row = out[..., DEAD, :]
    if bool(row.isnan().all()):
        return "NaN"
    if bool((row == 0).all()):
        return "0"
    torch.testing.assert_close(row, VALUE.mean(-2), atol=1e-5, rtol=1e-5)
    return "average of all values"
