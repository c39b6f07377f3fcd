"""ONE table of tiny transformers models for the tests of the registration.

    for case in CASES:
        model = case.build()                 # eager attention, random weights, float64
        inputs = case.inputs("left")         # keyword arguments of its forward, padded on the left
        case.layers                          # how many attention layers a forward pass runs

Weights are drawn with a spread at which attention is far from uniform; biases, norms and sinks are
random too. Nothing is read from disk or network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from watch import Watch

LENGTH = 9
VOCABULARY = 50

Window = tuple[int | None, int | None]


def _sizes(**more: Any) -> dict[str, Any]:
    """The options that most configurations call by the same names."""
    common = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return common | more


def _seq2seq(**more: Any) -> dict[str, Any]:
    """The options of the encoder-decoders of BART's family."""
    common = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
        "max_position_embeddings": 64,
    }
    return common | more


@dataclass(frozen=True)
class Case:
    """One model: `layers` is how many attention layers its forward pass runs."""

    name: str
    config: Callable[[], Any]
    layers: int
    kind: str = "text"  # which inputs it takes: text, image, image and text, seq2seq, speech
    causal: bool = False  # a decoder, or a model with one
    sides: tuple[str, ...] = ("no mask", "ones", "left", "right")  # see padding()
    generates: str | None = None  # the auto class that generates
    windows: tuple[Window, ...] = ((None, None),)  # (window_left, window_right) of its layers
    biased: bool = False  # its layers add a learned bias to the scores
    other_softmax: tuple[str, ...] = ()  # of what is not attention: a router among experts

    def __str__(self) -> str:
        return self.name

    def build(self, auto: str = "AutoModel", dtype: torch.dtype = torch.float64) -> Any:
        """The model, with eager attention, in evaluation mode."""
        torch.manual_seed(3)
        config = self.config()
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part._experts_implementation = "eager"  # the only one in float64
        model = getattr(transformers, auto).from_config(config, attn_implementation="eager")
        randomize(model)
        return model.to(dtype).eval()

    def inputs(self, side: str = "no mask", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        """Three samples; the second is padded on the given side, the third a little."""
        given = self._inputs(side, dtype)
        if side == "no mask":
            given.pop("attention_mask", None)
        return given

    def _inputs(self, side: str, dtype: torch.dtype) -> dict[str, Any]:
        random = torch.Generator().manual_seed(5)
        mask = padding(side)
        ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=random).masked_fill(mask == 0, 0)
        text = {"input_ids": ids, "attention_mask": mask}
        image = torch.randn(3, 3, 16, 16, generator=random, dtype=torch.float64).to(dtype)
        target = torch.randint(3, VOCABULARY, (3, 5), generator=random)
        if self.kind == "image":
            return {"pixel_values": image}
        if self.kind == "image and text":
            return text | {"pixel_values": image}
        if self.kind == "seq2seq":
            return text | {"decoder_input_ids": target}
        if self.kind == "mel":
            mel = torch.randn(3, 8, 24, generator=random, dtype=torch.float64).to(dtype)
            return {"input_features": mel, "decoder_input_ids": target}
        if self.kind == "speech":
            speech = torch.randn(3, 160, generator=random, dtype=torch.float64).to(dtype)
            return {
                "input_values": speech,
                "attention_mask": mask.repeat_interleave(18, 1)[:, :160],
            }
        return text


def padding(side: str, length: int = LENGTH) -> Tensor:
    """An attention mask (3, length), 1 takes part: padded on this side, "left" or "right"."""
    mask = torch.ones(3, length, dtype=torch.int64)
    if side == "left":
        mask[1, :4] = mask[2, :1] = 0
    if side == "right":
        mask[1, -4:] = mask[2, -1:] = 0
    return mask


def randomize(model: torch.nn.Module) -> None:
    """Weights at which attention is far from uniform; norms, biases and sinks near their start."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)


CASES = (
    Case("bert", lambda: transformers.BertConfig(**_sizes()), 2),
    Case("roberta", lambda: transformers.RobertaConfig(**_sizes()), 2),
    Case(
        "modernbert",
        lambda: transformers.ModernBertConfig(
            **_sizes(num_hidden_layers=4), local_attention=4, cls_token_id=1, sep_token_id=2
        ),
        4,
        windows=((2, 2), (None, None)),
    ),
    Case(
        "vit",
        lambda: transformers.ViTConfig(**_sizes(), image_size=16, patch_size=4),
        2,
        kind="image",
        sides=("no mask",),
    ),
    Case(
        "clip",
        lambda: transformers.CLIPConfig(
            text_config=_sizes(max_position_embeddings=LENGTH),
            vision_config=_sizes(image_size=16, patch_size=4),
            projection_dim=16,
        ),
        4,
        kind="image and text",
        causal=True,
        sides=("no mask", "ones", "right"),
    ),
    Case(
        "gpt2",
        lambda: transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
    ),
    Case(
        "llama",
        lambda: transformers.LlamaConfig(**_sizes(), num_key_value_heads=2),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
    ),
    Case(
        "mistral",
        lambda: transformers.MistralConfig(
            **_sizes(), num_key_value_heads=2, head_dim=8, sliding_window=4
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
        windows=((3, 0),),
    ),
    Case(
        "qwen3",
        lambda: transformers.Qwen3Config(
            **_sizes(), num_key_value_heads=2, head_dim=8, use_sliding_window=True,
            sliding_window=4, max_window_layers=1,
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
        windows=((3, 0), (None, None)),
    ),
    Case(
        "gemma2",
        lambda: transformers.Gemma2Config(
            **_sizes(), num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0, sliding_window=4,
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
        windows=((3, 0), (None, None)),
    ),
    Case(
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **_sizes(), num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8,
            sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
        windows=((3, 0), (None, None)),
    ),
    Case(
        "gpt_oss",
        lambda: transformers.GptOssConfig(
            **_sizes(), num_key_value_heads=2, head_dim=8, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        ),
        2,
        causal=True,
        generates="AutoModelForCausalLM",
        other_softmax=("aten::_softmax",),
        windows=((3, 0), (None, None)),
    ),
    Case(
        "t5",
        lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
            relative_attention_num_buckets=8, relative_attention_max_distance=16,
            pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, dropout_rate=0.0,
        ),
        6,
        biased=True,
        kind="seq2seq",
        causal=True,
        generates="AutoModelForSeq2SeqLM",
    ),
    Case(
        "marian",
        lambda: transformers.MarianConfig(**_seq2seq()),
        6,
        kind="seq2seq",
        causal=True,
        generates="AutoModelForSeq2SeqLM",
    ),
    Case(
        "bart",
        lambda: transformers.BartConfig(**_seq2seq()),
        6,
        kind="seq2seq",
        causal=True,
        generates="AutoModelForSeq2SeqLM",
    ),
    Case(
        "whisper",
        lambda: transformers.WhisperConfig(
            **_seq2seq(), num_mel_bins=8, max_source_positions=12, max_target_positions=32,
            begin_suppress_tokens=None, suppress_tokens=None,
        ),
        6,
        kind="mel",
        causal=True,
        sides=("no mask",),
        generates="AutoModelForSpeechSeq2Seq",
    ),
    Case(
        "wav2vec2",
        lambda: transformers.Wav2Vec2Config(
            **_sizes(), conv_dim=(16, 16), conv_kernel=(8, 4), conv_stride=(4, 2),
            num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
        ),
        2,
        kind="speech",
        sides=("no mask", "ones", "right"),
    ),
)  # fmt: skip


# Models that the common sizes build, of two layers: transformers' names of their configurations.
IMAGES = ("deit", "dinov2")
OTHERS = (
    *IMAGES, "cohere2", "distilbert", "electra", "gemma", "gpt_neox", "granite", "mixtral",
    "olmo2", "opt", "phi3", "qwen2", "smollm3", "stablelm", "starcoder2", "xlm-roberta",
)  # fmt: skip


def config_of(name: str) -> Any:
    """A small configuration of a model outside the table."""
    more: dict[str, Any] = {"max_position_embeddings": 64, "num_key_value_heads": 2}
    if name in IMAGES:
        more = {"image_size": 16, "patch_size": 4}
    return transformers.CONFIG_MAPPING[name](**_sizes(**more))


class ExactSoftmax(TorchFunctionMode):
    """Eager attention as an oracle in float64: many models ask for a float32 softmax all the same.

    In float32 it would round the weights, and turn a row of finfo(float64).min into NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        softmax = func in (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)
        if softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


class Record(Watch):
    """A Watch that keeps what our forward operator was given: a dictionary per call."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.attention_ext.attention.default:
            names = [a.name for a in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.arguments.append({name: x for name, x in given.items() if x is not None})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def given(self, name: str) -> list[Any]:
        """What each call had for this argument, None for nothing."""
        return [call.get(name) for call in self.arguments]
