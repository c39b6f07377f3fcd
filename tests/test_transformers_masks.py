"""transformers' mask interface on ours: what stays structured, what becomes dense, and that both
are the mask that transformers would have made."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

from transformers import masking_utils as theirs

from attention_ext.integrations import transformers as integration
from attention_ext.integrations._transformers_masks import StructuredMask, structured_mask

pytestmark = pytest.mark.slow

PADDING = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 5 + [0] * 4]).bool()
SEQUENCES = torch.tensor([[0] * 4 + [1] * 5]).expand(3, 9)

# name: (transformers' mask function, the window it is, or None if it is no band)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int | None, int | None] | None]] = {
    "causal": (theirs.causal_mask_function, (None, 0)),
    "bidirectional": (theirs.bidirectional_mask_function, (None, None)),
    "causal window": (theirs.sliding_window_causal_mask_function(4), (3, 0)),
    "window of one": (theirs.sliding_window_causal_mask_function(1), (0, 0)),
    "bidirectional window": (theirs.sliding_window_bidirectional_mask_function(2), (2, 2)),
    "a user's band": (lambda b, h, q, k: (k < q + 3) & (q - 2 < k), (1, 2)),
    "a user's other band": (lambda b, h, q, k: (q >= k - 1) & (abs(k - q) < 3), (2, 1)),
    "two windows": (
        theirs.and_masks(
            theirs.sliding_window_causal_mask_function(6), theirs.sliding_window_overlay(3)
        ),
        (2, 0),
    ),
    "chunks": (theirs.chunked_causal_mask_function(3, torch.tensor([0, 3, 0])), None),
    "packed": (
        theirs.and_masks(
            theirs.causal_mask_function, theirs.packed_sequence_mask_function(SEQUENCES)
        ),
        None,
    ),
    "causal or image": (
        theirs.or_masks(
            theirs.causal_mask_function, theirs.blockwise_overlay(torch.full((3, 9), -1))
        ),
        None,
    ),
    "every other key": (lambda b, h, q, k: k % 2 == 0, None),
    "up to a position": (lambda b, h, q, k: k <= 4, None),
    "from a position": (lambda b, h, q, k: q >= 2, None),
    "no row is negative": (lambda b, h, q, k: (q > -1) & (k <= q), (None, 0)),
    "by head": (lambda b, h, q, k: k <= q + h, None),
    "by sequence": (lambda b, h, q, k: (k <= q) & (b != 1), None),
    "mirrored": (lambda b, h, q, k: q + k <= 8, None),
}


def call(function: Callable[..., Any], **more: Any) -> dict[str, Any]:
    sizes = {"batch_size": 3, "q_length": 9, "kv_length": 9, "allow_is_bidirectional_skip": True}
    return sizes | {"mask_function": function} | more


def expected(arguments: dict[str, Any]) -> Tensor:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return theirs.sdpa_mask(**(arguments | skips))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_mask_is_transformers(name: str, padded: bool) -> None:
    function, window = FUNCTIONS[name]
    arguments = call(function, attention_mask=PADDING if padded else None)
    mask = structured_mask(**arguments)
    assert mask.shape == (3, 1, 9, 9)
    assert mask.dtype == torch.bool
    assert torch.equal(mask & True, expected(arguments))
    if window is None:
        assert type(mask) is Tensor
    else:
        assert isinstance(mask, StructuredMask)
        assert mask.window == window
        assert (mask.key_mask is not None) == padded


@pytest.mark.parametrize("padding", [None, PADDING, PADDING[:, :7]], ids=["none", "all", "short"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(1, 9, 8, 0), (3, 9, 6, 0), (1, 4, 8, 5), (3, 6, 6, 3), (9, 9, 0, 0), (2, 9, 3, 0)],
)
@pytest.mark.parametrize("name", ["causal", "causal window", "bidirectional", "a user's band"])
def test_offsets_of_caches_are_kept(
    name: str, q_length: int, kv_length: int, q_offset: int, kv_offset: int, padding: Tensor | None
) -> None:
    arguments = call(
        FUNCTIONS[name][0], q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, attention_mask=padding,
    )  # fmt: skip
    mask = structured_mask(**arguments)
    assert isinstance(mask, StructuredMask)
    assert mask.query_offset == q_offset - kv_offset
    assert torch.equal(mask.dense(), expected(arguments))


def test_static_caches_and_forbidden_skips_get_a_dense_mask() -> None:
    """A static cache's offset is a tensor, which its layers add to in place later."""
    offset = torch.tensor(4)
    for more in (
        {"q_length": 2, "q_offset": offset},
        {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    ):
        arguments = call(theirs.causal_mask_function, attention_mask=PADDING, **more)
        right = expected(arguments)
        mask = structured_mask(**arguments)
        assert type(mask) is Tensor
        assert torch.equal(mask, right)


def a_mask() -> StructuredMask:
    return StructuredMask((3, 1, 4, 9), (3, 0), 5, PADDING, "cpu")


def test_whatever_looks_at_a_structured_mask_sees_the_dense_one() -> None:
    mask = a_mask()
    dense = mask.dense()
    assert type(dense) is Tensor
    for look in (
        lambda m: m[:, :, :, :6],
        lambda m: torch.where(m, 0.0, torch.finfo(torch.float32).min),
        lambda m: m.to(torch.float32),
        lambda m: ~m,
        lambda m: m.expand(3, 2, 4, 9),
        lambda m: torch.cat([m, m], -1),
        lambda m: m.index_select(0, torch.tensor([2, 0])),
        lambda m: m.sum(),
    ):
        assert torch.equal(look(mask), look(dense))
        assert type(look(mask)) is Tensor
    assert "window=(3, 0)" in repr(mask)


def test_copies_of_a_structured_mask_stay_structured() -> None:
    for copy in (a_mask().detach(), a_mask().clone()):
        assert isinstance(copy, StructuredMask)
        assert (copy.window, copy.query_offset) == ((3, 0), 5)
        assert torch.equal(copy.dense(), a_mask().dense())


def test_an_offset_may_be_a_number_per_sequence() -> None:
    offsets = torch.tensor([5, 2, -1])
    mask = StructuredMask((3, 1, 4, 9), (3, 0), offsets, PADDING, "cpu")
    for n, offset in enumerate(offsets.tolist()):
        one = StructuredMask((1, 1, 4, 9), (3, 0), offset, PADDING[n : n + 1], "cpu")
        assert torch.equal(mask.dense()[n : n + 1], one.dense())
    inner, context = mask.__tensor_flatten__()
    parts = {name: getattr(mask, name) for name in inner}
    again = StructuredMask.__tensor_unflatten__(parts, context, mask.shape, None)
    assert torch.equal(again.dense(), mask.dense())


def test_a_mask_of_one_row_serves_every_query() -> None:
    mask = StructuredMask((3, 1, 1, 9), (None, None), 0, PADDING, "cpu")
    x = torch.randn(3, 2, 9, 8)
    got, _ = integration._attention_forward(torch.nn.Module(), x[:, :, :5], x, x, mask)
    want, _ = integration._attention_forward(torch.nn.Module(), x[:, :, :5], x, x, mask.dense())
    assert torch.equal(got, want)


def test_a_mask_stores_no_square() -> None:
    mask = structured_mask(**call(theirs.causal_mask_function, q_length=10**6, kv_length=10**6))
    assert mask.shape == (3, 1, 10**6, 10**6)  # 3 TB if it were dense
    x = torch.randn(3, 1, 10**6, 1)
    with pytest.raises(RuntimeError, match="mask is for 1000000 queries and 1000000 keys, got 1"):
        integration._attention_forward(torch.nn.Module(), x[:, :, :1], x, x, mask)


def test_compiled_code_makes_and_reads_structured_masks() -> None:
    def attend(x: Tensor, padding: Tensor) -> Tensor:
        function = theirs.sliding_window_causal_mask_function(4)
        mask = structured_mask(**call(function, attention_mask=padding))
        assert isinstance(mask, StructuredMask)
        return integration._attention_forward(torch.nn.Module(), x, x, x, mask)[0]

    x = torch.randn(3, 2, 9, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, PADDING), attend(x, PADDING))


def test_a_structured_mask_is_an_input_of_compiled_code() -> None:
    def attend(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return integration._attention_forward(torch.nn.Module(), x, y, y, mask)[0]

    x, y = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 9, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got = compiled(x, y, a_mask())
    torch.testing.assert_close(got, attend(x, y, a_mask().dense()))
