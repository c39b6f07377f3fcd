"""Switching transformers models to ours: what is refused, and what must not be silent."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_causal_mask

import attention_ext
from attention_ext.integrations import transformers as integration
from hf_cases import CASES, LENGTH, VOCABULARY, Case, ExactSoftmax, Record, padding
from watch import Watch

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
IMAGE = {"image_size": 16, "patch_size": 4}


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, integration.NAME, raising=False)


# ---- names


def test_the_name_is_none_that_transformers_treats_specially() -> None:
    for special in ("/", "|", "flash", "sdpa", "flex", "eager", "paged"):
        assert special not in integration.NAME


def test_the_name_without_registration_is_an_error(unregistered: None) -> None:
    with pytest.raises(ValueError, match=r'attn_implementation="attention_ext"` is not supported'):
        transformers.AutoModel.from_config(
            case_of("bert").config(), attn_implementation=integration.NAME
        )
    model = transformers.AutoModel.from_config(case_of("bert").config())
    model.config._attn_implementation_internal = integration.NAME  # past transformers' check
    with pytest.raises(KeyError, match="attention_ext"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_masks_are_registered_with_the_attention(unregistered: None) -> None:
    """Without its mask interface a name gets None for every mask, causality and padding lost."""
    config = case_of("llama").config()
    config._attn_implementation_internal = integration.NAME
    arguments = (config, torch.zeros(3, LENGTH, 32), padding("left"), None)
    assert create_causal_mask(*arguments) is None
    integration.register()
    assert create_causal_mask(*arguments) is not None


def test_registering_twice_is_harmless() -> None:
    assert integration.register() == integration.register() == "attention_ext"


# ---- use


def test_use_reaches_parts_with_a_configuration_of_their_own() -> None:
    """transformers 5.18 leaves T5's encoder and decoder as they were, and says nothing."""
    case = case_of("t5")
    model = case.build()
    assert {part.config._attn_implementation for part in (model.encoder, model.decoder)} == {
        "eager"
    }
    assert integration.use(model) == 6
    with Watch() as seen:
        model(**case.inputs())
    assert seen.ours == 6


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: transformers.MPNetConfig(**SMALL), "MPNetSelfAttention"),
        (
            lambda: transformers.LongformerConfig(**SMALL, attention_window=4),
            "LongformerSelfAttention",
        ),
        (lambda: transformers.DebertaConfig(**SMALL), "DisentangledSelfAttention"),
    ],
)
def test_a_model_that_would_keep_its_own_attention_is_refused(config: Any, named: str) -> None:
    """transformers accepts the name for them, and goes on as before."""
    model = transformers.AutoModel.from_config(config())
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match=rf"its {named} has the attention written out"):
        integration.use(model)
    assert model.config._attn_implementation == before


def test_a_model_with_one_foreign_layer_is_refused() -> None:
    model = case_of("bert").build()
    model.encoder.layer[1].attention.self = torch.nn.MultiheadAttention(32, 4)
    with pytest.raises(RuntimeError, match="its MultiheadAttention has the attention written out"):
        integration.use(model)


def test_torchs_module_inside_a_model_is_replaced_first() -> None:
    """SigLIP pools by an nn.MultiheadAttention behind layers that ask for an implementation."""
    case = Case("siglip", lambda: transformers.SiglipVisionConfig(**SMALL, **IMAGE), 3, "image")
    model, inputs = case.build(), case.inputs()
    with ExactSoftmax(), torch.no_grad():
        expected = model(**inputs)
    with pytest.raises(RuntimeError, match=r"call attention_ext\.replace_attention\(model\) first"):
        integration.use(model)
    assert attention_ext.replace_attention(model) == 1
    assert integration.use(model) == case.layers
    with Watch() as seen, torch.no_grad():
        got = model(**inputs)
    assert seen.ours == case.layers
    assert seen.other_ways == []
    for name in ("last_hidden_state", "pooler_output"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-10, atol=1e-10)


def test_a_layer_that_transformers_does_not_switch_is_found() -> None:
    model = case_of("bert").build()
    own = case_of("bert").config()
    own._attn_implementation_internal = "eager"
    model.encoder.layer[1].attention.self.config = own
    with pytest.raises(RuntimeError, match="left BertSelfAttention with another implementation"):
        integration.use(model)
    assert model.config._attn_implementation == "eager"


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8)
    with pytest.raises(RuntimeError, match=r"ResNetModel .* no attention found"):
        integration.use(transformers.AutoModel.from_config(config))


def test_a_model_of_two_towers_is_as_it_was_after_a_refusal() -> None:
    model = case_of("clip").build()
    own = case_of("bert").config()
    own._attn_implementation_internal = "eager"
    model.text_model.encoder.layers[0].self_attn.config = own
    with pytest.raises(RuntimeError, match="left CLIPAttention"):
        integration.use(model)
    configs = (model.config, model.config.text_config, model.config.vision_config)
    assert [config._attn_implementation for config in configs] == ["eager"] * 3


def test_use_works_through_wrappers() -> None:
    case = case_of("bert")
    wrapped = torch.nn.DataParallel(case.build())
    assert integration.use(wrapped) == case.layers
    with Watch() as seen:
        wrapped(**case.inputs())
    assert seen.ours == case.layers


# ---- keywords


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [("cu_seq_lens_q", "position_ids alone"), ("head_mask", "silently"), ("new_thing", "silently")],
)
def test_keywords_it_cannot_honour_are_refused_by_name(keyword: str, advice: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    module = torch.nn.Linear(1, 1)
    expected = rf"keyword '{keyword}' that Linear passes; .*{advice}"
    with pytest.raises(NotImplementedError, match=expected):
        integration._attention_forward(module, x, x, x, None, **{keyword: torch.ones(2)})
    integration._attention_forward(module, x, x, x, None, **{keyword: None}, use_cache=True)


def test_a_trainers_and_a_routers_keywords_are_not_the_attentions() -> None:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    integration.use(model)
    ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    with Watch() as seen:
        out = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(8),
                    output_router_logits=True, output_hidden_states=True)  # fmt: skip
    assert seen.ours == 2
    assert out.router_logits is not None


def test_the_setting_for_all_calls_is_refused_by_transformers() -> None:
    """Weights are there per call; the configuration's switch is eager attention's alone."""
    model = case_of("bert").build()
    integration.use(model)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


# ---- masks that a user or a model makes


def hidden(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).last_hidden_state


def against_eager(case: Case, real: Tensor | None = None, **inputs: Any) -> Record:
    model = case.build()
    with ExactSoftmax():
        expected = hidden(model, **inputs)
    integration.use(model)
    with Record() as seen:
        got = hidden(model, **inputs)
    real = torch.ones(got.shape[:2], dtype=torch.bool) if real is None else real
    torch.testing.assert_close(got[real], expected[real], rtol=1e-10, atol=1e-10)
    assert seen.ours == case.layers
    return seen


def ids() -> Tensor:
    return case_of("llama").inputs()["input_ids"]


def test_a_users_bool_mask_is_obeyed() -> None:
    mask = torch.rand(3, 1, LENGTH, LENGTH) > 0.4
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    # Eager attention adds its masks: it cannot take a bool one.
    model = case_of("llama").build()
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    with ExactSoftmax():
        expected = hidden(model, input_ids=ids(), attention_mask=added)
    integration.use(model)
    with Record() as seen:
        got = hidden(model, input_ids=ids(), attention_mask=mask)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert all(given is mask for given in seen.given("attn_mask"))
    torch.testing.assert_close(hidden(model, input_ids=ids(), attention_mask=added), got)


def test_a_users_float_mask_is_added() -> None:
    """finfo.min is a number: a row of nothing else is the uniform average, as in eager."""
    mask = torch.randn(3, 1, LENGTH, LENGTH, dtype=torch.float64)
    mask[0, 0, 2] = torch.finfo(torch.float64).min
    seen = against_eager(case_of("llama"), input_ids=ids(), attention_mask=mask)
    assert all(given is mask for given in seen.given("attn_bias"))


def test_packed_sequences_are_kept_apart() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)
    case = case_of("llama")
    against_eager(case, input_ids=ids(), position_ids=positions)
    model = case.build()
    integration.use(model)
    packed = hidden(model, input_ids=ids(), position_ids=positions)
    alone = torch.cat([hidden(model, input_ids=part) for part in ids().split([4, 5], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_decoder_turned_encoder_sees_both_ways(name: str, side: str) -> None:
    case = case_of(name)

    def config() -> Any:
        encoder = case.config()
        encoder.is_causal = False
        return encoder

    both_ways = Case(case.name, config, case.layers)
    mask = padding(side)
    seen = against_eager(both_ways, mask.bool(), input_ids=ids(), attention_mask=mask)
    assert seen.given("attn_mask") == [None, None]
    assert not any(seen.given("is_causal"))


@pytest.mark.parametrize(
    "option",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
    ids=str,
)
def test_gpt2s_ways_of_scaling_are_obeyed(option: dict[str, bool]) -> None:
    case = case_of("gpt2")

    def config() -> Any:
        changed = case.config()
        for name, value in option.items():
            setattr(changed, name, value)
        return changed

    seen = against_eager(Case(case.name, config, case.layers), input_ids=ids())
    scales = [1.0, 1.0] if "scale_attn_weights" in option else [8**-0.5, 8**-0.5 / 2]
    assert seen.given("scale") == pytest.approx(scales)


def test_padding_rows_of_a_decoder_are_zero_not_an_average() -> None:
    """On the left they see no key. Their hidden states stay finite, in 16 bits too."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        model = case_of("llama").build(dtype=dtype)
        integration.use(model)
        mask = padding("left")
        out = model(input_ids=ids(), attention_mask=mask, output_attentions=True)
        out.last_hidden_state.sum().backward()
        for weights in out.attentions:
            rows = weights.transpose(1, 2)[mask == 0]
            assert rows.eq(0).all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- what no mask means, as transformers' own functions have it


def without_mask(rows: int, keys: int, **more: Any) -> tuple[Tensor, Tensor]:
    """(ours, transformers' sdpa) for random queries, keys and values."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.is_causal = more.pop("causal_module", True)
    q = torch.randn(2, 4, rows, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 4, keys, 8, dtype=torch.float64).unbind(0)
    ours, _ = integration._attention_forward(module, q, k, v, None, **more)
    theirs, _ = sdpa_attention_forward(module, q, k, v, None, **more)
    return ours, theirs


@pytest.mark.parametrize("more", [{}, {"is_causal": False}, {"is_causal": True},
                                  {"causal_module": False}, {"scaling": 0.1}], ids=str)  # fmt: skip
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (1, 5), (3, 5)])
def test_no_mask_means_what_transformers_sdpa_means(
    rows: int, keys: int, more: dict[str, Any]
) -> None:
    """Three rows and five keys are a prompt in an empty static cache: aligned top left."""
    ours, theirs = without_mask(rows, keys, **more)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous()


@pytest.mark.parametrize("rows", [9, 3, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_without_a_mask_counts_as_flash_attentions(causal: bool, rows: int) -> None:
    x = torch.randn(1, 1, 9, 4, dtype=torch.float64)
    _, weights = integration._attention_forward(
        torch.nn.Module(), x[:, :, :rows], x, x, None, is_causal=causal, sliding_window=3,
        output_attentions=True,
    )  # fmt: skip
    distance = torch.arange(9) - torch.arange(9 - rows, 9)[:, None]
    assert torch.equal(weights[0, 0] > 0, (distance >= -2) & (distance <= (0 if causal else 2)))


def test_sinks_and_position_bias_are_honoured_together() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    added = torch.randn(2, 1, 6, 6)
    out, weights = integration._attention_forward(
        torch.nn.Module(), q, k, v, added, scaling=0.5, s_aux=sinks, position_bias=bias,
        output_attentions=True,
    )  # fmt: skip
    scores = 0.5 * q @ k.transpose(-1, -2) + bias + added
    sink = sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)
    expected = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ v).transpose(1, 2))
    got = torch.autograd.grad(out.square().sum(), (bias, sinks))
    want = torch.autograd.grad((expected @ v).square().sum(), (bias, sinks))
    torch.testing.assert_close(got, want)
