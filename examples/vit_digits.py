"""A Vision Transformer on scikit-learn's digits, trained from scratch on the fused operator.

    python examples/vit_digits.py --out out

Images of 8x8 pixels become 49 overlapping patches of 2x2 and a class token. Accuracy on held-out
images is printed beside two baselines; the attention of the class token is drawn over images.
Needs the packages scikit-learn, matplotlib and tqdm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from tqdm import tqdm

import attention_ext
from common import (
    CountCalls,
    count_layers,
    headline,
    new_figure,
    print_calls,
    read_options,
    save,
    weights_of,
)

PATCHES = 7  # along each side


class VisionTransformer(nn.Module):
    """Overlapping patches, a class token, learned positions, torch's encoder, a linear head."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + PATCHES**2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 8, 8) -> (N, 10) logits"""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1)
        return self.head(self.encoder(tokens + self.positions)[:, 0])


def split_digits(held_out: int = 360) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then held-out ones, in an order drawn once."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    return images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, batch: int = 64) -> None:
    """AdamW over shuffled batches; each batch may move by one pixel to the left or right."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    progress = tqdm(total=steps, desc="training", leave=False)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(batch)[: len(images) // batch]:
            shift = int(torch.randint(-1, 2, ()))
            moved = nn.functional.pad(images[chosen], (shift, -shift))
            loss = nn.functional.cross_entropy(model(moved), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    progress.close()


def predict(model: nn.Module, images: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(images).argmax(-1)


def percent(right: Tensor) -> str:
    return f"{100 * right.float().mean().item():.1f} % ({int(right.sum())} of {len(right)})"


def draw(model: VisionTransformer, images: Tensor, labels: Tensor, path: Path) -> None:
    """Draw ten held-out digits, and over each what the class token looks at in the last layer."""
    first = [int((labels == digit).nonzero()[0]) for digit in range(10)]
    shown = images[first]
    last = model.encoder.layers[-1].self_attn
    weights = weights_of([last], lambda: model(shown))[0].mean(1)[:, 0, 1:]  # (10, patches)
    patches = weights.unflatten(1, (1, PATCHES, PATCHES))
    # Each pixel gets the mean of the patches that cover it.
    ones = torch.ones(1, 1, 2, 2)
    spread = nn.functional.conv_transpose2d(patches, ones)
    spread = spread / nn.functional.conv_transpose2d(torch.ones_like(patches), ones)
    guesses = predict(model, shown)
    figure = new_figure(10, 3)
    axes = figure.subplots(2, 10)
    for n in range(10):
        axes[0, n].imshow(shown[n, 0], cmap="gray_r")
        axes[0, n].set_title(f"{labels[first[n]]}, seen as {guesses[n]}", fontsize=8)
        axes[1, n].imshow(shown[n, 0], cmap="gray_r")
        axes[1, n].imshow(spread[n, 0], cmap="magma", alpha=0.7)
        for axis in axes[:, n]:
            axis.set_axis_off()
    figure.suptitle("Held-out digits; the class token's attention, last layer, heads averaged")
    save(figure, path)


def main() -> None:
    options = read_options(__doc__)
    images, labels, held_images, held_labels = split_digits()
    model = VisionTransformer()
    replaced = attention_ext.replace_attention(model)
    headline("A Vision Transformer on digits")
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(images)} images to learn from, {len(held_images)} held out; {parameters} parameters"
    )
    print(f"{replaced} of {count_layers(model)} attention modules replaced")
    with CountCalls() as seen:
        nn.functional.cross_entropy(model(images[:8]), labels[:8]).backward()
    print_calls(seen, count_layers(model), "one training step")

    train(model, images, labels, epochs=8 if options.quick else 30)
    with CountCalls() as seen:
        guesses = predict(model, held_images)
    print_calls(seen, count_layers(model), "one evaluation")

    commonest = labels.mode().values
    linear = LogisticRegression(max_iter=2000).fit(images.flatten(1).numpy(), labels.numpy())
    by_linear = torch.from_numpy(linear.predict(held_images.flatten(1).numpy()))
    print(f"  accuracy, held-out images:                {percent(guesses == held_labels)}")
    print(f"  baseline, always the commonest digit:     {percent(commonest == held_labels)}")
    print(f"  baseline, logistic regression on pixels:  {percent(by_linear == held_labels)}")
    draw(model, held_images, held_labels, options.out / "vit_digits.png")


if __name__ == "__main__":
    main()
