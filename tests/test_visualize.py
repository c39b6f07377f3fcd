"""plot_attention: what is drawn, what is written beside it, and what it refuses."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_ext.visualize import plot_attention
from tiers import run_python

WORDS = ["the", "animal", "was", "too", "tired", "to", "cross"]


def maps(figure: Any) -> list[Any]:
    """The axes that show an image, in order."""
    return [axis for axis in figure.axes if axis.get_images()]


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]


def test_one_map_shows_the_weights_and_both_lists_of_tokens() -> None:
    weights = torch.rand(3, 7)
    figure = plot_attention(weights, ["a", "b", "c"], WORDS, title="a title")
    (axis,) = maps(figure)
    np.testing.assert_array_equal(axis.get_images()[0].get_array(), weights.numpy())
    assert labels(axis.yaxis) == ["a", "b", "c"]
    assert labels(axis.xaxis) == WORDS
    assert figure.get_suptitle() == "a title"


def test_keys_have_the_queries_tokens_by_default() -> None:
    (axis,) = maps(plot_attention(torch.rand(7, 7), WORDS))
    assert labels(axis.xaxis) == labels(axis.yaxis) == WORDS


@pytest.mark.parametrize("heads", [1, 2, 5, 12])
def test_a_grid_shows_every_head_in_one_scale(heads: int) -> None:
    weights = torch.rand(heads, 7, 7)
    figure = plot_attention(weights, WORDS)
    axes = maps(figure)
    assert [axis.get_title() for axis in axes] == [f"head {h}" for h in range(heads)]
    for axis, head in zip(axes, weights, strict=True):
        image = axis.get_images()[0]
        np.testing.assert_array_equal(image.get_array(), head.numpy())
        assert image.get_clim() == (0.0, pytest.approx(weights.max().item()))
    # Words stand on the left and below the last map of each column only.
    assert labels(axes[0].yaxis) == WORDS
    assert labels(axes[-1].xaxis) == WORDS
    if heads == 12:
        assert labels(axes[0].xaxis) == labels(axes[1].yaxis) == []


def test_titles_columns_and_scale_can_be_chosen() -> None:
    titles = ["x", "y", "z"]
    figure = plot_attention(torch.rand(3, 2, 2), "ab", titles=titles, columns=3, max_weight=2.0)
    axes = maps(figure)
    assert [axis.get_title() for axis in axes] == titles
    assert len({round(axis.get_position().y0, 6) for axis in axes}) == 1
    assert axes[0].get_images()[0].get_clim() == (0.0, 2.0)


def test_long_lists_of_tokens_stay_readable(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(400)]
    figure = plot_attention(torch.rand(400, 400), tokens)
    width, height = figure.get_size_inches()
    assert max(width, height) < 15
    (axis,) = maps(figure)
    for side in (axis.xaxis, axis.yaxis):
        shown = labels(side)
        step = len(tokens) // len(shown)
        assert 20 <= len(shown) <= 100
        assert shown == tokens[:: step if tokens[::step] == shown else step + 1]
    figure.savefig(tmp_path / "long.png")  # text that overlaps would not be seen otherwise
    renderer = figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in axis.yaxis.get_ticklabels()]
    tops = sorted((box.y0, box.y1) for box in boxes)
    assert all(below[1] <= above[0] + 1 for below, above in itertools.pairwise(tops))


def test_odd_tokens_and_values_are_drawn(tmp_path: Path) -> None:
    weights = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]], dtype=torch.bfloat16)
    figure = plot_attention(weights.requires_grad_(), ["$x_1$", "[PAD]"], ["$", "é"])
    figure.savefig(tmp_path / "odd.png")
    assert (tmp_path / "odd.png").read_bytes().startswith(b"\x89PNG")
    (axis,) = maps(figure)
    assert axis.get_images()[0].get_clim() == (0.0, 1.0)


@pytest.mark.parametrize(
    ("weights", "arguments", "message"),
    [
        (torch.rand(2, 3), (["a"], ["x", "y", "z"]), r"tokens_q must have 2 entries.*got 1"),
        (torch.rand(2, 3), (["a", "b"],), r"tokens_k must have 3 entries.*got 2"),
        (torch.rand(1, 2, 2, 2), (["a", "b"],), r"\(L, S\) or \(H, L, S\), got \(1, 2, 2, 2\)"),
        ([[1.0]], (["a"],), r"\(L, S\) or \(H, L, S\), got list"),
        (torch.rand(0, 2), ([], ["a", "b"]), "must not be empty"),
    ],
)
def test_what_does_not_fit_is_refused(weights: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_attention(weights, *arguments)
    with pytest.raises(ValueError, match="titles must have 2 entries"):
        plot_attention(torch.rand(2, 1, 1), ["a"], titles=["one"])


def test_missing_matplotlib_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install matplotlib"):
        plot_attention(torch.rand(1, 1), ["a"])


@pytest.mark.slow
def test_matplotlib_comes_with_the_first_plot_and_pyplot_never() -> None:
    code = """
import sys, torch, attention_ext
print("matplotlib" in sys.modules)
attention_ext.visualize.plot_attention(torch.rand(2, 2), ["a", "b"])
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    assert run_python(code).stdout.split() == ["False", "True", "False"]
