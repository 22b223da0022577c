"""A variational autoencoder with categorical latents as a Lightning module.

Lightning takes over the loop; the discrete layer is one call in `training_step`. Digits are described by ten
variables with eight categories each, with a uniform prior. The table has the negative evidence lower bound
of test images in nats. Run with `python examples/lightning_vae.py`; it needs `pip install lightning`.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from common import compare, options
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.utils.data import DataLoader

import gapped
from gapped.distributions import OneHotCategorical
from gapped_lab.data import load

LATENTS, CATEGORIES, PIXELS, HIDDEN, BATCH = 10, 8, 64, 128, 100
digits = load("digits")
train_images, test_images = (part.float() / digits.scale for part in (digits.train, digits.test))


class VAE(lightning.LightningModule):
    def __init__(self, estimator: gapped.Pathwise) -> None:
        super().__init__()
        self.estimator = estimator
        width = LATENTS * CATEGORIES
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))
        self.decoder = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))
        self.register_buffer("prior", torch.zeros(CATEGORIES))

    def loss(self, images: Tensor) -> Tensor:
        """The negative evidence lower bound with one sample, averaged over the images."""
        logits = self.encoder(images).unflatten(-1, (LATENTS, CATEGORIES))
        posterior = OneHotCategorical(logits=logits, estimator=self.estimator)
        pixels = self.decoder(posterior.rsample().flatten(-2))
        misfit = nn.functional.binary_cross_entropy_with_logits(pixels, images, reduction="none").sum(-1)
        divergence = kl_divergence(posterior, OneHotCategorical(logits=self.prior)).sum(-1)
        return (misfit + divergence).mean()

    def training_step(self, images: Tensor, index: int) -> Tensor:
        return self.loss(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def fit(estimator: gapped.Pathwise, steps: int, seed: int) -> VAE:
    torch.manual_seed(seed)
    vae = VAE(estimator)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(vae, DataLoader(train_images, batch_size=BATCH, shuffle=True))
    return vae.eval()


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    vae = fit(estimator, steps, seed)
    with torch.no_grad():
        bound = torch.stack([vae.loss(test_images) for _ in range(20)]).mean()
    return {"test negative ELBO": float(bound)}


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """Test digits, and what the decoder makes of a sample of their latents."""
    from picture import images

    vae, shown = fit(estimator, steps, seed), test_images[:12]
    with torch.no_grad():
        logits = vae.encoder(shown).unflatten(-1, (LATENTS, CATEGORIES))
        sample = OneHotCategorical(logits=logits, estimator=estimator).sample()
        pixels = vae.decoder(sample.flatten(-2)).sigmoid()
    pictures = {"digit": shown, "decoded": pixels}
    images(figure, {name: rows.view(-1, 8, 8).numpy() for name, rows in pictures.items()})


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=300, estimators=estimators).parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it announces every run
    # Lightning 2.6 uses a name that torch has deprecated since.
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    compare(train, arguments, draw, 100)


if __name__ == "__main__":
    main()
