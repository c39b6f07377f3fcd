"""A causal character model on Python's own documentation, trained on packed paragraphs.

    python examples/charmodel.py --out out

Paragraphs of all lengths lie one behind the other in a batch without padding
(attention_ext.varlen_attention); every letter sees itself and the 63 before it, a sliding window,
and tells distances by ALiBi. Prints bits per letter on held-out pages beside two baselines, writes
a sample and draws the loss. Needs matplotlib and tqdm; the text comes with Python.
"""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn
from tqdm import tqdm

import attention_ext
from common import CountCalls, headline, new_figure, print_calls, read_options, save

WINDOW = (63, 0)  # keys to the left and right of each letter


class Block(nn.Module):
    """Attention over packed sequences, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads
        slopes = 2.0 ** -torch.arange(1.0, heads + 1)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, borders: Tensor) -> Tensor:
        """(T, E) letters of all sequences -> (T, E)"""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)  # (T, H, E/H)
        mixed = attention_ext.varlen_attention(
            q, k, v, borders, borders, window=WINDOW, alibi_slopes=self.slopes
        )
        x = x + self.out(mixed.flatten(1))
        return x + self.feed(x)


class CharModel(nn.Module):
    def __init__(self, letters: int, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))
        self.reach = layers * WINDOW[0] + 1  # letters that the last one depends on, itself included

    def forward(self, tokens: Tensor, borders: Tensor) -> Tensor:
        """Tokens (T) and borders (sequences + 1) -> (T, letters) scores of each next letter."""
        x = self.letters(tokens)
        for block in self.blocks:
            x = block(x, borders)
        return self.head(x)


class Text:
    """Paragraphs of the documentation as numbers; 0 starts and ends a paragraph."""

    def __init__(self) -> None:
        pages = [topics.topics[name] for name in sorted(topics.topics)]
        text = "".join(pages)
        common = {c for c in set(text) if text.count(c) >= 20}
        self.letters = ["\0", *sorted(common)]
        number = {letter: n for n, letter in enumerate(self.letters)}
        self.number = number

        def paragraphs(pages: list[str]) -> list[Tensor]:
            parts = [p for page in pages for p in re.split(r"\n\s*\n", page) if len(p) > 20]
            rows = [[0, *(number[c] for c in p if c in number), 0] for p in parts]
            return [torch.tensor(row[:1000]) for row in rows]

        self.held = paragraphs(pages[::10])
        self.train = paragraphs([page for n, page in enumerate(pages) if n % 10])


def pack(paragraphs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (T), targets (T) and borders of paragraphs laid one behind the other."""
    lengths = torch.tensor([len(p) - 1 for p in paragraphs])
    borders = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return (
        torch.cat([p[:-1] for p in paragraphs]),
        torch.cat([p[1:] for p in paragraphs]),
        borders,
    )


def draw_batch(paragraphs: list[Tensor], letters: int) -> list[Tensor]:
    """Draw paragraphs until they hold that many letters."""
    batch: list[Tensor] = []
    while sum(map(len, batch)) < letters:
        batch.append(paragraphs[int(torch.randint(len(paragraphs), ()))])
    return batch


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean number of bits per letter."""
    return nn.functional.cross_entropy(logits, targets) / torch.log(torch.tensor(2.0))


def evaluate(model: nn.Module, paragraphs: list[Tensor]) -> float:
    inputs, targets, borders = pack(paragraphs)
    with torch.no_grad():
        return bits(model(inputs, borders), targets).item()


def count_baselines(text: Text, held: list[Tensor]) -> tuple[float, float]:
    """Bits per letter of counted frequencies: of letters, and of letters after each letter."""
    inputs, targets, _ = pack(text.train)
    size = len(text.letters)
    pairs = torch.bincount(inputs * size + targets, minlength=size * size).view(size, size) + 0.1
    held_inputs, held_targets, _ = pack(held)
    single = pairs.sum(0).log().expand(len(held_targets), size)
    return bits(single, held_targets).item(), bits(pairs.log()[held_inputs], held_targets).item()


def train(
    model: nn.Module, text: Text, held: list[Tensor], steps: int, letters: int
) -> tuple[list[float], list[tuple[int, float]]]:
    """Return bits per letter at every step, and (step, bits) on held-out text now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    curve, held_curve = [], []
    progress = tqdm(range(steps), desc="training", leave=False)
    for step in progress:
        if step % max(1, steps // 10) == 0:
            held_curve.append((step, evaluate(model, held)))
        inputs, targets, borders = pack(draw_batch(text.train, letters))
        loss = bits(model(inputs, borders), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append(loss.item())
        progress.set_postfix(bits=f"{curve[-1]:.2f}")
    held_curve.append((steps, evaluate(model, held)))
    return curve, held_curve


def next_letter(model: CharModel, tokens: Tensor, reach: int) -> Tensor:
    """Return the scores (letters) of what comes next, given the last `reach` tokens."""
    seen = tokens[-reach:]
    with torch.no_grad():
        return model(seen, torch.tensor([0, len(seen)]))[-1]


def write(model: CharModel, text: Text, start: str, length: int, temperature: float = 0.7) -> str:
    """Continue a paragraph letter by letter."""
    tokens = [0, *(text.number[c] for c in start)]
    for _ in range(length):
        logits = next_letter(model, torch.tensor(tokens), model.reach)
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1))
        if token == 0:
            break
        tokens.append(token)
    return "".join(text.letters[token] for token in tokens[1:])


def draw(
    curve: list[float],
    held_curve: list[tuple[int, float]],
    baselines: tuple[float, float],
    path: Path,
) -> None:
    figure = new_figure(7, 4)
    axis = figure.subplots()
    axis.plot(range(len(curve)), curve, color="0.7", label="training, each step")
    axis.plot(*zip(*held_curve, strict=True), "o-", color="C3", label="held-out pages")
    axis.axhline(baselines[0], color="C0", ls=":", label="letter frequencies")
    axis.axhline(baselines[1], color="C2", ls="--", label="frequencies after each letter")
    axis.set(xlabel="step", ylabel="bits per letter", ylim=(0, None))
    axis.set_title("A character model on Python's documentation, packed, window of 64 letters")
    axis.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    options = read_options(__doc__)
    text = Text()
    model = CharModel(len(text.letters))
    held = text.held[:60] if options.quick else text.held
    headline("A character model on Python's documentation")
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{sum(map(len, text.train))} letters in {len(text.train)} paragraphs to learn from, "
        f"{sum(map(len, held))} in {len(held)} held out; {parameters} parameters"
    )
    batch = draw_batch(text.train, 2000)
    inputs, targets, borders = pack(batch)
    with CountCalls() as seen:
        bits(model(inputs, borders), targets).backward()
    print_calls(seen, len(model.blocks), "one training step")

    if options.quick:
        curve, held_curve = train(model, text, held, steps=80, letters=2000)
    else:
        curve, held_curve = train(model, text, held, steps=300, letters=4000)
    baselines = count_baselines(text, held)
    print("Bits per letter on held-out pages:")
    print(f"  the model                                   {held_curve[-1][1]:.3f}")
    print(f"  baseline, frequencies of letters            {baselines[0]:.3f}")
    print(f"  baseline, frequencies after each letter     {baselines[1]:.3f}")

    with torch.no_grad():
        packed = model(inputs, borders)
        alone = torch.cat([model(p[:-1], torch.tensor([0, len(p) - 1])) for p in batch])
    difference = (packed - alone).abs().max().item()
    print(f"{len(batch)} paragraphs packed and alone, largest difference: {difference:.1e}")
    whole = max(held, key=len)
    scores = [next_letter(model, whole, n) for n in (len(whole), model.reach, model.reach // 8)]
    same, fewer = ((scores[0] - other).abs().max().item() for other in scores[1:])
    print(
        f"The last {model.reach} of {len(whole)} letters instead of all change the next letter's "
        f"scores by {same:.1e}, the last {model.reach // 8} by {fewer:.1e}"
    )
    print("A sample:")
    for line in write(model, text, "The ", 60 if options.quick else 400).splitlines():
        print(f"  | {line}")
    draw(curve, held_curve, baselines, options.out / "charmodel.png")


if __name__ == "__main__":
    main()
