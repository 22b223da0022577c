"""An autoencoder that describes an image by a few entries of a learned codebook.

The encoder turns a digit into eight vectors. Each is replaced by an entry of a codebook with 32 entries,
drawn with probabilities that fall with the squared distance, and the decoder sees the chosen entries only.
The sample carries the gradient back to the encoder and to the codebook, so no commitment loss, no moving
average of the codebook and no straight-through trick of one's own is needed.

Run with `python examples/vq_autoencoder.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from common import compare, options
from torch import Tensor, nn

import gapped
from gapped_lab.data import load

SLOTS, CODES, WIDTH, HIDDEN, BATCH = 8, 32, 8, 128, 128
digits = load("digits")
train_images, test_images = (part.float() / digits.scale for part in (digits.train, digits.test))


class VQAutoencoder(nn.Module):
    """Image to codes and back; choosing is the only discrete step."""

    def __init__(self, estimator: gapped.Pathwise) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SLOTS * WIDTH))
        self.codebook = nn.Parameter(torch.randn(CODES, WIDTH))
        self.estimator = estimator
        self.decoder = nn.Sequential(nn.Linear(SLOTS * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64))

    def logits(self, images: Tensor) -> Tensor:
        """Minus the squared distance of every slot to every code, ``(batch, slots, codes)``."""
        slots = self.encoder(images).unflatten(-1, (SLOTS, WIDTH))
        return -(slots.unsqueeze(-2) - self.codebook).square().sum(-1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        draw = "sample" if self.training else "argmax"
        choice = gapped.choose(self.logits(images), estimator=self.estimator, draw=draw)
        return self.decoder(choice.select(self.codebook).flatten(-2)), choice.index


def error(reconstruction: Tensor, images: Tensor) -> Tensor:
    """Squared error of an image, summed over its pixels, averaged over images."""
    return (reconstruction - images).square().sum(-1).mean()


def fit(estimator: gapped.Pathwise, steps: int, seed: int) -> VQAutoencoder:
    torch.manual_seed(seed)
    model = VQAutoencoder(estimator)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        images = train_images[torch.randint(len(train_images), (BATCH,))]
        reconstruction, _ = model(images)
        optimiser.zero_grad()
        error(reconstruction, images).backward()
        optimiser.step()
    return model.eval()


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    model = fit(estimator, steps, seed)
    with torch.no_grad():
        reconstruction, codes = model(test_images)
    usage = codes.flatten().bincount(minlength=CODES) / codes.numel()
    perplexity = float(torch.special.entr(usage).sum().exp())
    return {
        "test error": float(error(reconstruction, test_images)),
        "codes used": float((usage > 0).sum()),
        "perplexity": perplexity,
    }


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """Test digits, and what the decoder makes of their codes."""
    from picture import images

    model, shown = fit(estimator, steps, seed), test_images[:12]
    with torch.no_grad():
        reconstruction, _ = model(shown)
    pictures = {"digit": shown, "from 8 codes": reconstruction}
    images(figure, {name: rows.view(-1, 8, 8).numpy() for name, rows in pictures.items()})


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=400, estimators=estimators).parse_args()
    print(f"the mean image has test error {float(error(train_images.mean(0), test_images)):.3f}\n")
    compare(train, arguments, draw, 100)


if __name__ == "__main__":
    main()
