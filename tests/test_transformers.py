"""The registration with Hugging Face transformers: small models, eager against ours."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from watch import Watch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import transformers

from attention_ext.integrations import transformers as integration

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 99,
}
MODELS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "llama, grouped heads": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral, window": lambda: transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=4
    ),
    "gemma 2, softcap": lambda: transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=0.05,
        sliding_window=4,
    ),
}


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(MODELS[name](), attn_implementation="eager").eval()
    return model.requires_grad_(True)


def use(model: Any, attention: str) -> Any:
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    return model


def padding(side: str) -> Tensor:
    mask = torch.ones(3, 9, dtype=torch.int64)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -4:] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_equal_eager(name: str, side: str) -> None:
    model = model_of(name)
    ids = torch.randint(0, 99, (3, 9))
    mask = padding(side)
    results = []
    for attention in ("eager", integration.register()):
        use(model, attention).zero_grad()
        with Watch() as seen:
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        real = hidden[mask.bool()]
        torch.manual_seed(7)
        (real * torch.randn(real.shape)).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append((real, torch.cat(grads)))
    assert seen.ours == 2
    assert seen.other_ways == []
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    grad, expected = results[1][1], results[0][1]
    torch.testing.assert_close(grad, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_a_routers_keywords_are_not_the_attentions() -> None:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        **{**SIZES, "intermediate_size": 40}, num_key_value_heads=2, num_local_experts=2
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(0, 99, (3, 9))
    hidden = []
    for attention in ("eager", integration.register()):
        with Watch() as seen, torch.no_grad():
            hidden.append(use(model, attention)(input_ids=ids).last_hidden_state)
    assert seen.ours == 2
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-5)


def test_padding_reaches_the_operator_as_one_row_per_sequence() -> None:
    mask = integration._attention_mask(3, 9, 9, attention_mask=padding("right").bool())
    assert mask is not None
    assert mask.shape == (3, 1, 1, 9)
    assert torch.equal(mask[:, 0, 0], padding("right").bool())
    assert integration._attention_mask(3, 9, 9) is None
    # More keys than the mask knows: empty slots of a cache, which stay hidden.
    longer = integration._attention_mask(3, 9, 12, attention_mask=padding("none").bool())
    assert longer is not None
    assert longer[..., 9:].eq(False).all()


def test_weights_are_returned_if_asked_for() -> None:
    model = model_of("bert")
    ids = torch.randint(0, 99, (3, 9))
    call = {"input_ids": ids, "attention_mask": padding("right"), "output_attentions": True}
    expected = use(model, "eager")(**call).attentions
    weights = use(model, integration.register())(**call).attentions
    rows = padding("right").bool()
    for mine, right in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine.transpose(1, 2)[rows], right.transpose(1, 2)[rows])


def test_generation_gives_eagers_tokens() -> None:
    torch.manual_seed(3)
    config = MODELS["llama, grouped heads"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    ids = torch.randint(3, 99, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **arguments)
    assert torch.equal(use(model, integration.register()).generate(ids, **arguments), expected)


def test_sinks_and_position_bias_are_honoured() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    bias = torch.randn(1, 4, 6, 6)
    sinks = torch.randn(4)
    module = torch.nn.Module()
    out, weights = integration._attention_forward(
        module, q, k, v, None, scaling=0.5, is_causal=False, s_aux=sinks, position_bias=bias,
        output_attentions=True,
    )  # fmt: skip
    scores = 0.5 * q @ k.transpose(-1, -2) + bias
    sink = sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)
    expected = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ v).transpose(1, 2))


@pytest.mark.parametrize("keyword", ["cu_seq_lens_q", "head_mask", "a_new_thing"])
def test_unknown_keywords_are_refused_by_name(keyword: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match=rf"keywords of Linear mean: {keyword}"):
        integration._attention_forward(module, x, x, x, None, **{keyword: torch.ones(2)})
    integration._attention_forward(module, x, x, x, None, **{keyword: None}, use_cache=True)
