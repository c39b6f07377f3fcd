"""Caches and generate(): token by token and chunk by chunk, ours against eager."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import transformers

from attention_ext.integrations import transformers as integration
from hf_cases import CASES, LENGTH, Case, ExactSoftmax, Record, padding

pytestmark = pytest.mark.slow

NEW = 8  # tokens: windows of 4 keys are passed well before the end
GENERATING = [case for case in CASES if case.generates is not None]
DECODERS = [case for case in GENERATING if case.kind == "text"]


def generate(model: Any, inputs: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """The tokens (3, ...) and the scores of every step (3, steps, vocabulary)."""
    torch.manual_seed(11)
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    arguments |= {"no_repeat_ngram_size": 1}  # random models would repeat one token
    out = model.generate(**inputs, **(arguments | more))
    return out.sequences, torch.stack(out.logits, 1)


def prompt(case: Case) -> dict[str, Any]:
    inputs = case.inputs("left" if "left" in case.sides else "no mask")
    inputs.pop("decoder_input_ids", None)
    return inputs


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", GENERATING, ids=str)
def test_generate_gives_eagers_tokens_and_scores(case: Case, cache: str) -> None:
    model, inputs = case.build(case.generates), prompt(case)
    more = {"cache_implementation": cache}
    with ExactSoftmax():
        tokens, scores = generate(model, inputs, **more)
    integration.use(model)
    with Record() as seen:
        ours, our_scores = generate(model, inputs, **more)
    torch.testing.assert_close(our_scores, scores, rtol=1e-9, atol=1e-9)
    assert torch.equal(ours, tokens)
    decoding = case.layers if case.kind == "text" else case.layers * 2 // 3  # the rest encodes
    assert seen.ours == case.layers + (NEW - 1) * decoding
    if cache == "dynamic":
        assert set(seen.given("attn_mask")) == {None}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(case: Case, cache: str) -> None:
    """Several queries behind cached keys: the offset counts, and a sliding cache has dropped some.

    Eager attention sees the prompt at once, without a cache.
    """
    model, inputs = case.build(), case.inputs("left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with ExactSoftmax(), torch.no_grad():
        whole = model(**inputs, position_ids=positions, use_cache=False).last_hidden_state
    integration.use(model)
    kept: Any = (
        transformers.DynamicCache(config=model.config)
        if cache == "dynamic"
        else transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    )
    parts = []
    with Record() as seen, torch.no_grad():
        for start, end in ((0, 5), (5, 6), (6, 9)):
            part = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=kept,
            )
            parts.append(part.last_hidden_state)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-10, atol=1e-10)
    assert seen.ours == 3 * case.layers
    if cache == "dynamic":
        assert set(seen.given("attn_mask")) == {None}
        # Behind a window of 4, three keys are left of the 6 when the last chunk arrives.
        last = seen.given("query_offset")[-case.layers :]
        assert set(last) == {3 if window[0] else 6 for window in case.windows}


def test_beam_search_gives_eagers_beams() -> None:
    case = next(case for case in CASES if case.name == "mistral")
    model, inputs = case.build(case.generates), prompt(case)
    more = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    with ExactSoftmax():
        expected, _ = generate(model, inputs, **more)
    integration.use(model)
    tokens, _ = generate(model, inputs, **more)
    assert torch.equal(tokens, expected)


def test_weights_are_collected_while_generating() -> None:
    case = next(case for case in CASES if case.name == "gpt2")  # keeps the wish to itself
    model, inputs = case.build(case.generates), prompt(case)
    integration.use(model)
    out = model.generate(
        **inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False,
        output_attentions=True, return_dict_in_generate=True,
    )  # fmt: skip
    shapes = [[tuple(w.shape) for w in step] for step in out.attentions]
    assert shapes == [[(3, 4, LENGTH, LENGTH)] * 2, [(3, 4, 1, LENGTH + 1)] * 2]
    hidden = out.attentions[1][0][..., :LENGTH][:, :, 0][
        padding("left")[:, None].expand(3, 4, -1) == 0
    ]
    assert hidden.eq(0).all()
