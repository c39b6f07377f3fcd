"""The registration with Hugging Face transformers: every model of the table against eager."""

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
from hf_cases import (
    CASES,
    IMAGES,
    LENGTH,
    OTHERS,
    Case,
    ExactSoftmax,
    Record,
    config_of,
    padding,
)
from watch import Watch

pytestmark = pytest.mark.slow

PADDED = [pytest.param(c, side, id=f"{c}-{side}") for c in CASES for side in c.sides]
OUTPUTS = (
    "last_hidden_state",
    "encoder_last_hidden_state",
    "pooler_output",
    "text_embeds",
    "image_embeds",
)


def real_rows(states: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Those rows of (B, L, ...) that are not padding, if it has the inputs' length."""
    mask = inputs.get("attention_mask")
    padded = mask is not None and states.shape[:2] == (3, LENGTH) == mask.shape
    return states[mask.bool()] if padded else states


def outputs_of(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    result = model(**inputs)
    found = [real_rows(result[name], inputs) for name in OUTPUTS if result.get(name) is not None]
    assert found
    return found


def gradients_of(model: Any, outputs: list[Tensor]) -> dict[str, Tensor | None]:
    """Of a fixed random projection of all outputs, for every parameter; None where it has none."""
    model.zero_grad()
    random = torch.Generator().manual_seed(7)
    sum((x * torch.randn(x.shape, generator=random).to(x)).sum() for x in outputs).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(
    ours: dict[str, Tensor | None], eager: dict[str, Tensor | None], tolerance: float
) -> None:
    """Each within tolerance of its own largest number, or of the model's if it is all but zero.

    Only CLIP's temperature and constant positions have none.
    """
    largest = max(g.abs().max().item() for g in eager.values() if g is not None)
    for name, expected in eager.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        assert got is not None or name.endswith(("logit_scale", "embed_positions.weight")), name
        if got is not None and expected is not None:
            allowed = tolerance * max(expected.abs().max().item(), 1e-3 * largest)
            assert (got - expected).abs().max().item() <= allowed, name


@pytest.mark.parametrize(("case", "side"), PADDED)
def test_outputs_and_every_gradient_equal_eager(case: Case, side: str) -> None:
    model, inputs = case.build(), case.inputs(side)
    with ExactSoftmax():
        expected = outputs_of(model, inputs)
        gradients = gradients_of(model, expected)
    assert integration.use(model) == case.layers
    with Record() as seen:
        outputs = outputs_of(model, inputs)
    assert seen.ours == case.layers
    assert seen.other_ways == list(case.other_softmax)
    for mine, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients_of(model, outputs), gradients, 1e-9)


@pytest.mark.parametrize(("case", "side"), PADDED)
def test_masks_reach_the_operator_as_what_they_are(case: Case, side: str) -> None:
    model, inputs = case.build(), case.inputs(side)
    integration.use(model)
    with Record() as seen:
        model(**inputs)
    assert seen.given("attn_mask") == [None] * case.layers
    biased = [bias is not None for bias in seen.given("attn_bias")]
    assert biased == [case.biased] * case.layers
    windows = {(call.get("window_left"), call.get("window_right")) for call in seen.arguments}
    assert windows == set(case.windows)
    assert any(seen.given("is_causal")) == (case.causal and (None, None) in windows)
    if side in ("left", "right") and case.kind != "speech":  # that one's mask is of samples
        masks = [mask for mask in seen.given("key_mask") if mask is not None]
        padded = [mask for mask in masks if mask.shape == (3, LENGTH)]
        assert padded
        assert all(torch.equal(mask, padding(side).bool()) for mask in padded)
        assert all(mask.all() for mask in masks if mask.shape != (3, LENGTH))  # a decoder's


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_built_with_the_name_runs_the_operator_in_every_layer(case: Case) -> None:
    model = transformers.AutoModel.from_config(
        case.config(), attn_implementation=integration.register()
    )
    with Watch() as seen, torch.no_grad():
        model(**case.inputs(dtype=torch.float32))
    assert seen.ours == case.layers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_come_from_the_operator_when_asked_for(case: Case) -> None:
    side = case.sides[-1]
    model, inputs = case.build(), case.inputs(side)
    with ExactSoftmax(), torch.no_grad():
        expected = attentions_of(model(**inputs, output_attentions=True))
    integration.use(model)
    with Watch() as seen, torch.no_grad():
        weights = attentions_of(model(**inputs, output_attentions=True))
    assert len(weights) == len(expected) == case.layers
    assert seen.calls["attention_ext::attention_weights"] == case.layers
    for mine, right in zip(weights, expected, strict=True):
        mine, right = (real_rows(x.transpose(1, 2), inputs) for x in (mine, right))
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


def attentions_of(output: Any) -> list[Tensor]:
    """Every layer's weights (B, H, L, S), of a model's parts too (CLIP has two towers)."""
    found = []
    for name, value in output.items():
        if name.endswith("attentions"):
            found += list(value)
        elif isinstance(value, transformers.utils.ModelOutput):
            found += attentions_of(value)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_models_outside_the_table_give_eagers_outputs_too(name: str) -> None:
    case = Case(name, lambda: config_of(name), 2, "image" if name in IMAGES else "text")
    model, inputs = case.build(), case.inputs("right")
    with ExactSoftmax(), torch.no_grad():
        expected = outputs_of(model, inputs)
    assert integration.use(model) == case.layers
    with Record() as seen, torch.no_grad():
        outputs = outputs_of(model, inputs)
    assert seen.ours == case.layers
    assert set(seen.given("attn_mask")) == {None}
    for mine, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-8)


def test_attention_matters_in_the_tables_models() -> None:
    """Otherwise wrong attention would pass: the weights are far from uniform."""
    for case in CASES:
        with torch.no_grad():
            for weights in attentions_of(case.build()(**case.inputs(), output_attentions=True)):
                visible = (weights > 0).sum(-1)
                assert (weights.amax(-1) * visible)[visible > 1].max() > 1.5, case.name
