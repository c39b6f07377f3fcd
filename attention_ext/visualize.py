"""Draws attention weights as heat maps.

Called by users and by examples/. Needs matplotlib, which is imported at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_attention"]

_LABEL_INCHES = 0.17  # room for one token label of 8 points along an axis
# Least and most inches of a map's side; a side that is full shows every n-th label.
_ALONE = (2.0, 9.0)
_IN_GRID = (2.0, 3.4)


def plot_attention(
    weights: Tensor,
    tokens_q: Sequence[str],
    tokens_k: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    columns: int | None = None,
    max_weight: float | None = None,
    cmap: str = "magma",
) -> Figure:
    r"""Draw attention weights as heat maps: queries downward, keys to the right, bright is much.

    All maps of a figure share one colour scale, which starts at 0. Axes with more tokens than fit
    show every n-th label, evenly spaced.

    Args:
        weights: (L, S) for one map, or (H, L, S) for a grid of heads; any float dtype and device.
            NaN is drawn in grey.
        tokens_q: L labels of the queries.
        tokens_k: S labels of the keys. Default: ``tokens_q``.

    Keyword args:
        titles: H titles of the maps. Default: ``head 0``, ``head 1``, ... in a grid.
        title: title of the whole figure.
        columns: maps in a row of the grid. Default: nearly square.
        max_weight: the brightest colour's weight. Default: the largest weight.
        cmap: a matplotlib colour map.

    Returns:
        A :class:`matplotlib.figure.Figure` that pyplot does not hold. ``figure.savefig(path)``
        writes it, a notebook shows it.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a number of tokens or titles that does not fit ``weights``.

    Example::

        >>> out, weights = attn(x, x, x, average_attn_weights=False)
        >>> plot_attention(weights[0], tokens).savefig("heads.png")
    """
    if not isinstance(weights, Tensor) or weights.dim() not in (2, 3):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights must be a tensor (L, S) or (H, L, S), got {shape}")
    tokens_k = tokens_q if tokens_k is None else tokens_k
    maps = weights.detach().to("cpu", torch.float32)
    maps = maps if maps.dim() == 3 else maps.unsqueeze(0)
    if titles is None:
        titles = [""] if weights.dim() == 2 else [f"head {h}" for h in range(len(maps))]
    _check_count("tokens_q", tokens_q, maps.size(1), weights)
    _check_count("tokens_k", tokens_k, maps.size(2), weights)
    _check_count("titles", titles, maps.size(0), weights)
    if maps.numel() == 0:
        raise ValueError(f"weights must not be empty, got {tuple(weights.shape)}")

    columns = min(columns or math.ceil(math.sqrt(len(maps))), len(maps))
    width, height = _map_size(maps)
    figure, axes = _grid(math.ceil(len(maps) / columns), columns, width, height)
    top = float(maps.nan_to_num(0.0).max()) if max_weight is None else max_weight
    colors = _color_map(cmap)
    for n, axis in enumerate(axes):
        if n >= len(maps):
            axis.set_axis_off()
            continue
        image = axis.imshow(maps[n].numpy(), cmap=colors, vmin=0.0, vmax=top or 1.0, aspect="auto")
        axis.set_title(titles[n], fontsize=9)
        _label(axis.xaxis, tokens_k if n + columns >= len(maps) else (), width)
        _label(axis.yaxis, tokens_q if n % columns == 0 else (), height)
        axis.tick_params(axis="x", rotation=90)
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention weight", aspect=30)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _check_count(name: str, labels: Sequence[str], expected: int, weights: Tensor) -> None:
    if len(labels) != expected:
        raise ValueError(
            f"{name} must have {expected} entries for weights {tuple(weights.shape)}, "
            f"got {len(labels)}"
        )


def _map_size(maps: Tensor) -> tuple[float, float]:
    """Return width and height in inches of one map."""
    least, most = _ALONE if len(maps) == 1 else _IN_GRID
    width, height = (min(max(n * _LABEL_INCHES, least), most) for n in (maps.size(2), maps.size(1)))
    return width, height


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of rows * columns maps with room for labels and the colour bar."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_attention needs matplotlib: pip install matplotlib (or attention_ext[visualize])"
        ) from error
    figure = Figure(
        figsize=(width * columns + 2.0, height * rows + 1.6), dpi=100, layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _label(axis: Any, tokens: Sequence[str], inches: float) -> None:
    """Write every n-th token label, with the n that fits the axis."""
    step = max(1, math.ceil(len(tokens) * _LABEL_INCHES / inches - 1e-6))
    shown = range(0, len(tokens), step)
    # A dollar sign would start a formula.
    axis.set_ticks(list(shown), [tokens[i].replace("$", r"\$") for i in shown], fontsize=8)


def _color_map(name: str) -> Any:
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(bad="0.6")
