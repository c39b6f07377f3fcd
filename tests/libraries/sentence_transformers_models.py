"""sentence-transformers: a model of transformers inside, which knows our attention by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compare import compare, make
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast

import attention_ext as ae
from attention_ext.integrations.transformers import register

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "animal",
    "did",
    "not",
    "cross",
    "a",
    "street",
    "it",
    "was",
    "too",
    "tired",
]
SENTENCES = ["The animal did not cross the street", "it was tired", "a street"]


def saved_model(folder: Path) -> str:
    """A small BERT with random weights and a vocabulary of its own, as files."""
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=37, max_position_embeddings=20, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def test_sentence_embeddings(tmp_path: Path) -> None:
    path = saved_model(tmp_path)

    def build(attention: str) -> nn.Module:
        words = Transformer(path, model_kwargs={"attn_implementation": attention})
        return SentenceTransformer(
            modules=[words, Pooling(words.get_embedding_dimension())], device="cpu"
        )

    def call(model: Any) -> Tensor:
        return model(model.preprocess(SENTENCES))["sentence_embedding"]

    ours = make(lambda: build(register()))
    assert ours[0].auto_model.config._attn_implementation == "attention_ext"
    compare(make(lambda: build("eager")), ours, call, 2)
    # What torch's function computes inside, the context takes over.
    compare(make(lambda: build("eager")), make(lambda: build("sdpa")), call, 2, ae.sdpa)
    encoded = torch.as_tensor(ours.encode(SENTENCES))
    torch.testing.assert_close(encoded, call(ours.eval()).detach())
