"""A convolutional discrete VAE on Fashion-MNIST: an image is a 7x7 grid of codes from a large codebook.

The encoder gives every position of the grid a distribution over the codebook, a code is drawn from it, and
the decoder sees the entries of the drawn codes only. The usual way to train this is that of DALL-E's image
tokenizer: soft Gumbel-softmax samples, mixtures of all entries, at a temperature annealed from 1 to 1/16.
The other estimators draw one code in training too, as at test time: the decoder gets `codebook[index]`, no
one-hot vector is written, and there is no schedule. `train` is all that `gapped.compare` needs.

Run with `python examples/discrete_vae.py`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped_lab.data import load

SIDE, WIDTH, COLDEST = 28, 64, 1 / 16
ESTIMATORS: dict[str, gapped.Pathwise] = {
    "gapmax": gapped.GapMax(),
    "gst": gapped.GST(),
    "gst:gap=1,tau=0.5": gapped.GST(0.5, gap=1),
    "soft gumbel-softmax, annealed": gapped.GumbelSoftmax(1.0, hard=False),
}


class DiscreteVAE(nn.Module):
    def __init__(self, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, WIDTH // 2, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(WIDTH // 2, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, 1, 1),
            nn.ReLU(),
        )
        self.head = nn.Linear(WIDTH, codes)
        self.codebook = nn.Parameter(0.3 * torch.randn(codes, WIDTH))
        self.decoder = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, WIDTH // 2, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH // 2, 1, 4, 2, 1),
        )

    def logits(self, images: Tensor) -> Tensor:
        """The logits of the codes, ``(batch, 7, 7, codes)``."""
        return self.head(self.encoder(images).movedim(1, -1))

    def decode(self, entries: Tensor) -> Tensor:
        """The logits of the pixels, from entries of the codebook, ``(batch, 7, 7, width)``."""
        return self.decoder(entries.movedim(-1, 1))

    def forward(self, images: Tensor, estimator: gapped.Pathwise) -> tuple[Tensor, Tensor]:
        """The two parts of the negative ELBO, in nats, averaged over images: reconstruction and KL."""
        logits = self.logits(images)
        if estimator.hard:
            entries = estimator.choose(logits).select(self.codebook)
        else:
            entries = estimator.sample(logits) @ self.codebook
        pixels = self.decode(entries)
        reconstruction = F.binary_cross_entropy_with_logits(pixels, images, reduction="sum")
        log_q = logits.log_softmax(-1)
        kl = (log_q.exp() * (log_q + math.log(logits.shape[-1]))).sum()  # to the uniform prior
        return reconstruction / len(images), kl / len(images)


@cache
def read(data: str, images: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Training images, a sixth as many test images, and one test image of each class."""
    whole = load(data, progress=False)
    classes = torch.stack([(whole.test_labels == label).nonzero()[0, 0] for label in range(10)])

    def prepare(pixels: Tensor) -> Tensor:
        return F.interpolate(pixels.to(device).view(-1, 1, whole.height, whole.width) / whole.scale, SIDE)

    return prepare(whole.train[:images]), prepare(whole.test[: images // 6]), prepare(whole.test[classes])


def train(
    estimator: gapped.Pathwise,
    seed: int,
    *,
    codes: int = 512,
    epochs: int = 4,
    images: int = 6000,
    batch: int = 64,
    data: str = "fashion-mnist",
    pictures: Path | None = None,
) -> Iterator[dict[str, float]]:
    """Train one model, and yield how good it is after each epoch.

    With `pictures`, a folder, the reconstructions of seed 0 are left there for `draw`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_images, test_images, shown = read(data, images, device)
    torch.manual_seed(seed)
    model = DiscreteVAE(codes).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(train_images), device=device).split(batch)
        for i, rows in enumerate(order):
            progress = (epoch + i / len(order)) / epochs
            reconstruction, kl = model(train_images[rows], annealed(estimator, progress))
            optimiser.zero_grad()
            (reconstruction + kl).backward()
            optimiser.step()
        yield evaluate(model, test_images, estimator)
    if pictures is not None and seed == 0:
        with torch.no_grad():
            likeliest = model.logits(shown).argmax(-1)
            pixels = model.decode(model.codebook[likeliest]).sigmoid()
        pictures.mkdir(parents=True, exist_ok=True)
        torch.save(pixels.cpu(), pictures / file_of(estimator))


def file_of(estimator: gapped.Pathwise) -> str:
    return re.sub(r"\W+", "-", repr(estimator)) + ".pt"


def annealed(estimator: gapped.Pathwise, progress: float) -> gapped.Pathwise:
    """A soft estimator gets colder along a cosine; a hard one needs no schedule."""
    if estimator.hard:
        return estimator
    warmth = (1 + math.cos(math.pi * progress)) / 2
    return replace(estimator, tau=COLDEST + (estimator.tau - COLDEST) * warmth)


@torch.no_grad()
def evaluate(model: DiscreteVAE, images: Tensor, estimator: gapped.Pathwise) -> dict[str, float]:
    """The negative ELBO with hard samples, whatever the training used; and how the codebook is used.

    A code counts as used if it is the most likely one somewhere. The perplexity is the exponential of the
    entropy of the codes' shares.
    """
    batches = images.split(500)
    parts = [torch.stack(model(batch, replace(estimator, hard=True))) * len(batch) for batch in batches]
    reconstruction, kl = (sum(parts) / len(images)).tolist()
    chosen = torch.cat([model.logits(batch).argmax(-1).flatten() for batch in batches])
    shares = chosen.bincount(minlength=len(model.codebook)) / len(chosen)
    return {
        "test negative ELBO": reconstruction + kl,
        "reconstruction": reconstruction,
        "KL": kl,
        "codes used": float((shares > 0).sum()),
        "perplexity": float(torch.special.entr(shares).sum().exp()),
    }


def show_parts(result: gapped.Comparison) -> None:
    """Print what the negative ELBO consists of, and how the codebook is used, a row for each estimator."""
    names = ("reconstruction", "KL", "codes used", "perplexity")
    print(f"{'mean over seeds':31}", *(f"{name:>6}" for name in names), sep="  ")
    for label in ESTIMATORS:
        runs = [record.metrics for record in result.records if record.label == label and record.metrics]
        means = {name: fmean(run[name] for run in runs) if runs else math.nan for name in names}
        print(f"{label:31}", *(f"{mean:{max(len(name), 6)}.1f}" for name, mean in means.items()), sep="  ")


def draw(originals: Tensor, pictures: Path, path: Path) -> None:
    """A row of originals and a row of reconstructions for each estimator, as a picture at `path`."""
    from matplotlib.figure import Figure

    files = {label: pictures / file_of(each) for label, each in ESTIMATORS.items()}
    rows = {"original": originals}
    rows |= {label: torch.load(path, weights_only=True) for label, path in files.items() if path.exists()}
    figure = Figure(figsize=(6, 0.64 * len(rows)))
    for axes, (label, row) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        axes.imshow(torch.cat([*row[:, 0]], dim=1).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set_xticks([])
        axes.set_yticks([SIDE / 2], [label])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codes", type=int, default=512, help="size of the codebook (default: 512)")
    parser.add_argument("--images", type=int, default=6000, help="training images (default: 6000)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over them (default: 4)")
    parser.add_argument("--batch", type=int, default=64, help="images a step (default: 64)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each estimator (default: 2)")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--data", default="fashion-mnist", help="fashion-mnist, mnist or digits")
    parser.add_argument("--out", type=Path, help="where records and picture go (default: in runs/)")
    parser.add_argument("--quick", action="store_true", help="a few seconds on embedded digits")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.data, chosen.codes, chosen.images, chosen.epochs, chosen.batch = "digits", 16, 300, 2, 30
        chosen.seeds = chosen.workers = 1
    settings = {name: getattr(chosen, name) for name in ("data", "codes", "images", "epochs", "batch")}
    # Records are known by estimator and seed: other settings, another folder.
    out = chosen.out or Path("runs", "-".join(["discrete-vae", *map(str, settings.values())]))
    originals = read(chosen.data, chosen.images, "cpu")[2]
    job = partial(train, **settings, pictures=out)
    result = gapped.compare(job, ESTIMATORS, chosen.seeds, out=out, workers=chosen.workers)
    print(f"{result}\n")
    show_parts(result)
    draw(originals, out, out / "reconstructions.png")
    print(f"\nreconstructions: {out / 'reconstructions.png'}")


if __name__ == "__main__":
    main()
