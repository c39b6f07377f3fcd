"""An encoder-decoder that learns to translate English names into Russian, letter by letter.

    python examples/translate.py --out out

The names of languages, countries, scripts and currencies come from Unicode's CLDR data in the
package babel. torch.nn.Transformer gets our attention in all its layers; batches are padded, and
the decoder must not see the future. Accuracy on held-out names is printed beside a baseline's, and
cross-attention is drawn as an alignment. Needs the packages babel, matplotlib and tqdm.
"""

from __future__ import annotations

import difflib
import warnings
from pathlib import Path

import torch
from babel import Locale
from torch import Tensor, nn
from tqdm import tqdm

import attention_ext
from attention_ext.visualize import plot_attention
from common import (
    CountCalls,
    count_layers,
    headline,
    print_calls,
    read_options,
    save,
    weights_of,
)

PAD, START, END = 0, 1, 2  # tokens before the letters
LONGEST = 24  # letters of a name

Pair = tuple[str, str]


def read_names() -> list[Pair]:
    """Return (English name, Russian name) from CLDR in small letters, each name once."""
    english, russian = Locale("en"), Locale("ru")
    pairs: dict[str, str] = {}
    for kind in ("languages", "territories", "scripts", "currencies"):
        names, translations = getattr(english, kind), getattr(russian, kind)
        for code in sorted(set(names) & set(translations)):
            pair = names[code].lower(), translations[code].lower()
            if max(map(len, pair)) <= LONGEST and not any(c.isdigit() for c in "".join(pair)):
                pairs.setdefault(*pair)
    return sorted(pairs.items())


def split_names(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Hold out an eighth of the translations: none of them is seen in training."""
    translations = sorted({translation for _, translation in pairs})
    order = torch.randperm(len(translations), generator=torch.Generator().manual_seed(0))
    held = {translations[n] for n in order[: len(order) // 8].tolist()}
    return [p for p in pairs if p[1] not in held], [p for p in pairs if p[1] in held]


class Alphabet:
    """Letters as numbers, names as padded rows."""

    def __init__(self, names: list[str]) -> None:
        self.letters = sorted(set("".join(names)))
        self.size = 3 + len(self.letters)
        self.numbers = {letter: 3 + n for n, letter in enumerate(self.letters)}

    def rows(self, names: list[str]) -> Tensor:
        """(N, longest + 2) tokens: start, letters, end, padding."""
        rows = [torch.tensor([START, *map(self.numbers.__getitem__, n), END]) for n in names]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    def name(self, row: Tensor) -> str:
        """The letters of a row, up to its end."""
        tokens = row.tolist()
        tokens = tokens[: tokens.index(END)] if END in tokens else tokens
        return "".join(self.letters[t - 3] for t in tokens if t >= 3)


class Translator(nn.Module):
    """torch.nn.Transformer between embeddings and a layer that scores the next letter."""

    def __init__(self, source: int, target: int, width: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source, width, padding_idx=PAD)
        self.target = nn.Embedding(target, width, padding_idx=PAD)
        self.positions = nn.Embedding(LONGEST + 8, width)
        with warnings.catch_warnings():  # the encoder says that norm_first allows no nested tensors
            warnings.filterwarnings("ignore", "enable_nested_tensor")
            self.transformer = nn.Transformer(
                width, 4, layers, layers, 2 * width, 0.1, batch_first=True, norm_first=True
            )
        self.head = nn.Linear(width, target)

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        return table(tokens) + self.positions.weight[: tokens.size(1)]

    def encode(self, source: Tensor) -> Tensor:
        return self.transformer.encoder(
            self.embed(self.source, source), src_key_padding_mask=source == PAD
        )

    def decode(self, memory: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """(N, T) tokens so far -> (N, T, letters) scores of the letter after each."""
        future = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        hidden = self.transformer.decoder(
            self.embed(self.target, target),
            memory,
            tgt_mask=future,  # True = hidden, as everywhere in torch.nn
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.head(hidden)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(self.encode(source), source, target)

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Write the likeliest letter, one after the other: (N, LONGEST + 1) tokens."""
        self.eval()
        memory = self.encode(source)
        target = torch.full((len(source), 1), START)
        for _ in range(LONGEST + 1):
            letter = self.decode(memory, source, target)[:, -1:].argmax(-1)
            target = torch.cat([target, letter.clamp(min=END)], dim=1)
            if (target == END).any(1).all():
                break
        return target


def loss_of(model: Translator, source: Tensor, target: Tensor, smoothing: float = 0.05) -> Tensor:
    logits = model(source, target[:, :-1])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=smoothing
    )


def train(model: Translator, source: Tensor, target: Tensor, steps: int, batch: int = 64) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    progress = tqdm(range(steps), desc="training", leave=False)
    order = torch.randperm(len(source))
    for step in progress:
        at = step * batch % len(source)
        if at < batch:
            order = torch.randperm(len(source))
        chosen = order[at : at + batch]
        loss = loss_of(model, trim(source[chosen]), trim(target[chosen]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def trim(rows: Tensor) -> Tensor:
    """Drop the columns that are padding in every row."""
    return rows[:, : int((rows != PAD).sum(1).max())]


def closest_known(name: str, known: dict[str, str]) -> str:
    """Return the translation of the training name that is spelt most alike."""
    likeness = difflib.SequenceMatcher(b=name)

    def ratio(other: str) -> float:
        likeness.set_seq1(other)
        return likeness.ratio()

    return known[max(known, key=ratio)]


def similarity(guesses: list[str], right: list[str]) -> float:
    """Return the mean of difflib's ratio: 1 if equal, 0 if no letter is shared."""
    ratios = [
        difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(guesses, right, strict=True)
    ]
    return sum(ratios) / len(ratios)


def report(title: str, guesses: list[str], right: list[str]) -> None:
    same = sum(a == b for a, b in zip(guesses, right, strict=True))
    print(
        f"  {title:38} exactly right {100 * same / len(right):5.1f} % ({same} of {len(right)}), "
        f"letters alike {100 * similarity(guesses, right):.1f} %"
    )


def draw(model: Translator, source: Alphabet, target: Alphabet, name: str, path: Path) -> None:
    """Draw the mean cross-attention of the last decoder layer while it writes one name."""
    row = source.rows([name])
    written = model.translate(row)
    translation = target.name(written[0])
    cross = model.transformer.decoder.layers[-1].multihead_attn
    weights = weights_of([cross], lambda: model(row, written[:, :-1]))[0][0].mean(0)
    figure = plot_attention(
        weights[: len(translation) + 1],
        [*translation, "end"],
        ["start", *(letter.replace(" ", "_") for letter in name), "end"],
        title=f'"{name}", held out, becomes "{translation}":\n'
        "cross-attention, last layer, heads averaged",
    )
    save(figure, path)


def main() -> None:
    options = read_options(__doc__)
    pairs = read_names()
    known, held = split_names(pairs)
    sources, targets = (Alphabet([p[side] for p in pairs]) for side in (0, 1))
    model = Translator(sources.size, targets.size, width=96, layers=2)
    replaced = attention_ext.replace_attention(model)
    headline("English names into Russian, letter by letter")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(known)} names to learn from, {len(held)} held out; {parameters} parameters")
    print(f"{replaced} of {count_layers(model)} attention modules replaced")
    source, target = (a.rows([p[n] for p in known]) for n, a in enumerate((sources, targets)))
    with CountCalls() as seen:
        loss_of(model, source[:8], target[:8]).backward()
    print_calls(seen, count_layers(model), "one training step")

    train(model, source, target, steps=150 if options.quick else 600)
    model.eval()
    names, right = [p[0] for p in held], [p[1] for p in held]
    held_source = sources.rows(names)
    with CountCalls() as seen, torch.no_grad():
        model(held_source, targets.rows(right)[:, :-1])
    print_calls(seen, count_layers(model), "one evaluation")

    guesses = [targets.name(row) for row in model.translate(held_source)]
    some = known[:: len(known) // 100]
    learnt = [targets.name(row) for row in model.translate(sources.rows([p[0] for p in some]))]
    report("learnt names, translated", learnt, [p[1] for p in some])
    report("held-out names, translated", guesses, right)
    table = dict(known)
    report("  baseline, the closest learnt name", [closest_known(n, table) for n in names], right)
    for name, guess, answer in list(zip(names, guesses, right, strict=True))[:: len(names) // 12]:
        print(f"    {name:24} {guess:24} {'right' if guess == answer else 'is: ' + answer}")
    alone = [targets.name(model.translate(sources.rows([name]))[0]) for name in names[:12]]
    alike = sum(a == b for a, b in zip(alone, guesses, strict=False))
    print(f"  a dozen alone, without padding: {alike} of {len(alone)} translated alike")
    done = [n for n, guess, answer in zip(names, guesses, right, strict=True) if guess == answer]
    draw(model, sources, targets, max(done or names, key=len), options.out / "translate.png")


if __name__ == "__main__":
    main()
