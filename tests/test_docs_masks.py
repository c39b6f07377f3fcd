"""docs/masks.md, run: what True, causal and windows mean in other libraries, and here.

Torch and transformers are asked here; ONNX, JAX and Keras, where `make test` has put them, in a
process of their own. flash-attn, xformers and cuDNN need a GPU: for them, ours is compared with the
formulas that the page takes from their documentation.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import attention_ext as ae
import mask_tables as t
from tiers import ROOT, run_pytest

FOLDER = ROOT / "build" / "mask_libraries"
# How many of the first table's tests there are; the second adds one for every row of the library.
LIBRARIES = {"onnx": 1, "jax": 1, "keras": 2}  # keras has a layer and a function


def sdpa(seen: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(t.QUERY, t.KEY, t.VALUE, seen, **options)


def operator(seen: Tensor | None = None, **options: Any) -> Tensor:
    return torch.ops.attention_ext.attention(t.QUERY, t.KEY, t.VALUE, seen, **options)[0]


def module(cls: type[nn.MultiheadAttention], **options: Any) -> Tensor:
    """A module's attention, with projections that change nothing."""
    size = t.H * t.E
    attention = cls(size, t.H, bias=False, batch_first=True)
    same = torch.eye(size)
    attention.load_state_dict({"in_proj_weight": same.repeat(3, 1), "out_proj.weight": same})
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (t.QUERY, t.KEY, t.VALUE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, _ = attention.eval()(q, k, v, **options)
    return out.detach().unflatten(-1, (t.H, t.E)).transpose(1, 2)


def transformers(seen: Tensor | None, eager: bool = False) -> Tensor:
    """What transformers computes for a 4-D mask, which eager attention gets as a float one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    layer = nn.Module().eval()
    layer.num_key_value_groups = 1
    layer.is_causal = False
    mask = None if seen is None else seen.expand(t.B, 1, -1, -1)
    if not eager:
        return sdpa_attention_forward(layer, t.QUERY, t.KEY, t.VALUE, mask)[0].transpose(1, 2)
    if mask is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    scaling = t.E**-0.5
    out, _ = eager_attention_forward(layer, t.QUERY, t.KEY, t.VALUE, mask, scaling)
    return out.transpose(1, 2)


def drawn(function: str, *window: int) -> Tensor:
    """transformers with the mask that one of its mask functions draws."""
    from transformers import masking_utils

    draw = getattr(masking_utils, function)
    mask = masking_utils.sdpa_mask(
        t.B, t.L, t.S, mask_function=draw(*window) if window else draw,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    )  # fmt: skip
    return transformers(mask)


W, l, r = (t.LETTERS[letter] for letter in "Wlr")
CALLS: dict[str, Callable[[], Tensor]] = {
    "`nn.MultiheadAttention`: `attn_mask=hidden`": lambda: module(
        nn.MultiheadAttention, attn_mask=~t.SEEN
    ),
    "`nn.MultiheadAttention`: `key_padding_mask=padding`": lambda: module(
        nn.MultiheadAttention, key_padding_mask=t.PADDING
    ),
    "`F.scaled_dot_product_attention`: `is_causal=True`": lambda: sdpa(is_causal=True),
    "`F.scaled_dot_product_attention`: `attn_mask=causal_lower_right(L, S)`": lambda: sdpa(
        causal_lower_right(t.L, t.S)
    ),
    "transformers, causal: `sliding_window=W`": lambda: drawn(
        "sliding_window_causal_mask_function", W
    ),
    "transformers, to both sides: `sliding_window=W`": lambda: drawn(
        "sliding_window_bidirectional_mask_function", W
    ),
}
# (row i, key j, L, S) -> whether i sees j, as their documentation has it.
FORMULAS: dict[str, Callable[[int, int, int, int], bool]] = {
    "flash-attn, `varlen_attn`: `causal=True`": lambda i, j, q, k: j <= i + k - q,
    "flash-attn, `varlen_attn`: `window_size=(l, r)`": lambda i, j, q, k: (
        i + k - q - l <= j <= i + k - q + r
    ),
    "xformers: `LowerTriangularMask()`": lambda i, j, q, k: j <= i,
    "xformers: `LowerTriangularFromBottomRightMask()`": lambda i, j, q, k: j <= i + k - q,
    "xformers: `LocalAttentionFromBottomRightMask(l, r)`": lambda i, j, q, k: (
        i - l <= j + q - k <= i + r
    ),
    "cuDNN, TOP_LEFT: `left_bound=l, right_bound=r`": lambda i, j, q, k: i - l < j <= i + r,
    "cuDNN, BOTTOM_RIGHT: `left_bound=l, right_bound=r`": lambda i, j, q, k: (
        i + k - q - l < j <= i + k - q + r
    ),
}
NOT_RUN = {"flash-attn; torch's `varlen_attn`", "xformers", "cuDNN's frontend"}
IN_LIBRARIES = {
    "ONNX `Attention`",
    "`jax.nn.dot_product_attention`",
    "Keras `ops.dot_product_attention`, `MultiHeadAttention`",
}

ours_module = "`ae.MultiheadAttention`"
torchs_module = "`torch.nn.MultiheadAttention`"
huggingface = "Hugging Face transformers"


def observed() -> dict[str, tuple[str, str, str]]:
    """By row: what True means, where the causal corner lies, what a row without keys gives."""

    def by_module(cls: type[nn.MultiheadAttention], need_weights: bool) -> tuple[str, str, str]:
        def attend(mask: Tensor) -> Tensor:
            return module(cls, attn_mask=mask, need_weights=need_weights)

        draws = torch.ones(t.L, t.S, dtype=torch.bool).triu(1)
        causal = module(cls, attn_mask=draws, is_causal=True, need_weights=need_weights)
        return t.polarity(attend), t.alignment(causal), t.dead_row(lambda seen: attend(~seen))

    true, corner, dead = by_module(nn.MultiheadAttention, True)
    assert by_module(nn.MultiheadAttention, False)[:2] == (true, corner)
    fast = by_module(nn.MultiheadAttention, False)[2]
    ours = by_module(ae.MultiheadAttention, True)
    assert ours == by_module(ae.MultiheadAttention, False)
    return {
        "`ae.attention`, the operators": (
            t.polarity(operator), t.alignment(operator(is_causal=True)), t.dead_row(operator)
        ),
        ours_module: (*ours[:2], f"{ours[2]} before `out_proj`"),
        torchs_module: (true, corner, f"{dead} with `need_weights=True`, else {fast}"),
        "`F.scaled_dot_product_attention`": (
            t.polarity(sdpa), t.alignment(sdpa(is_causal=True)), t.dead_row(sdpa)
        ),
    }  # fmt: skip


def test_torch_and_ours_do_what_the_table_says() -> None:
    for row, (true, corner, dead) in observed().items():
        cells = t.CONVENTIONS[row]
        assert (cells[1], cells[4]) == (true, dead), row
        assert cells[3].startswith(corner), row
    lower = t.alignment(sdpa(causal_lower_right(t.L, t.S)))
    assert (
        f"{lower} by `causal_lower_right`" in t.CONVENTIONS["`F.scaled_dot_product_attention`"][3]
    )


def test_transformers_does_what_the_table_says() -> None:
    pytest.importorskip("transformers", reason="two rows of the table are about transformers")
    _, true, _, corner, dead = t.CONVENTIONS[huggingface]
    assert true == t.polarity(transformers)
    assert corner.startswith(t.alignment(drawn("causal_mask_function")))
    eager = t.dead_row(lambda seen: transformers(seen, eager=True))
    assert dead == f"{eager} (eager), {t.dead_row(transformers)} (sdpa)"


@pytest.mark.parametrize("row", CALLS)
def test_call_is_the_one_beside_it(row: str) -> None:
    if row.startswith("transformers"):
        pytest.importorskip("transformers", reason="the row is about transformers")
    torch.testing.assert_close(t.spelled_here(row), CALLS[row](), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", FORMULAS)
@pytest.mark.parametrize("lengths", [(4, 7), (7, 4)], ids=str)
def test_call_obeys_the_formula_of_a_library_that_needs_a_gpu(
    row: str, lengths: tuple[int, int]
) -> None:
    rows, keys = lengths
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (rows, keys, keys))
    formula = FORMULAS[row]
    seen = torch.tensor([[formula(i, j, rows, keys) for j in range(keys)] for i in range(rows)])
    scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~seen, -torch.inf)
    right = torch.where(seen.any(-1)[:, None], scores.softmax(-1) @ v, 0.0)
    torch.testing.assert_close(t.spelled_here(row, q, k, v), right)


def rows_of(library: str) -> list[str]:
    return [row for row in t.SPELLINGS if row.lower().startswith(library)]


def test_every_row_is_compared_or_named_as_one_that_cannot_be() -> None:
    ran = {*observed(), huggingface, *IN_LIBRARIES}
    assert set(t.CONVENTIONS) == ran | NOT_RUN
    others = [row for library in LIBRARIES for row in rows_of(library)]
    assert sorted(t.SPELLINGS) == sorted([*CALLS, *FORMULAS, *others])


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_library_does_what_the_page_says(library: str) -> None:
    if not (FOLDER / library).is_dir():
        pytest.skip(f"{library} is not in build/mask_libraries: make test installs it")
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    done = run_pytest(
        "tests/libraries/mask_conventions.py", "-k", library,
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    expected = LIBRARIES[library] + len(rows_of(library))
    assert re.search(rf"^{expected} passed", done.stdout, re.MULTILINE), done.stdout
