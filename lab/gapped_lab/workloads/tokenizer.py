"""A tokenizer of images: an autoencoder whose 8 x 8 positions each take one of many codes.

Encoder, decoder, optimiser, data and steps are the same for every cell; the quantizer between them differs.
Incumbents are the layers of vector-quantize-pytorch with the options of their authors. The first number is
the mean squared error of test images, pixels in [0, 1], with codes taken as each method takes them at test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped.errors import require
from gapped.pathwise import resolve_pathwise
from gapped_lab.workloads import Training, at, data, falling, seeded, sizes_of

FSQ_LEVELS = {64: (8, 8), 1024: (8, 5, 5, 5), 4096: (7, 5, 5, 5, 5), 16384: (8, 8, 8, 6, 5)}
"""Levels that Mentzer et al. (2024) give for about as many codes."""

RELEASED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # van den Oord et al. (2017) with moving averages and replaced dead codes, as people run it.
    "vq-ema": (
        "VectorQuantize",
        {
            "decay": 0.99,
            "commitment_weight": 0.25,
            "kmeans_init": True,
            "threshold_ema_dead_code": 2,
            "straight_through": False,
            "rotation_trick": False,
        },
    ),
    # Fifty et al. (2024)
    "vq-rotation": (
        "VectorQuantize",
        {
            "decay": 0.99,
            "commitment_weight": 0.25,
            "kmeans_init": True,
            "threshold_ema_dead_code": 2,
            "rotation_trick": True,
        },
    ),
    "diveq": (
        "VectorQuantize",
        {"directional_reparam": True, "threshold_ema_dead_code": 2},
    ),  # Vali et al. (2025)
    "simvq": ("SimVQ", {}),  # Zhu et al. (2024)
    "fsq": ("FSQ", {}),  # Mentzer et al. (2024)
    "lfq": ("LFQ", {"entropy_loss_weight": 0.02, "diversity_gamma": 1.0}),  # Yu et al. (2024)
}


@dataclass(frozen=True)
class Cell:
    """A way to take a code, and the sizes."""

    way: str
    """A name of `RELEASED`, or an estimator's text: that of a choice among the codes."""
    codes: int
    logits: str = "distance"
    """For estimators: "distance", to the entries themselves, or "linear", a layer of their own."""
    usage: float = 0.0
    """For estimators: the weight of the divergence of the codes' average from equal use."""
    tau: tuple[float, float] | None = None
    """For estimators: temperatures at the first and the last step, geometric between."""
    data: str = "cifar10"
    epochs: int = 20
    batch: int = 256
    width: int = 64
    size: int = 64
    """Numbers of an entry."""
    rate: float = 1e-3


ESTIMATORS = ("gapmax", "gumbel-softmax:tau=1", "gumbel-softmax:tau=0.5", "gst", "reinmax:tau=1.5")


SMALL = {"data": "digits", "batch": 100, "width": 32, "size": 16}


def settings(quick: bool) -> dict[str, dict[str, Cell]]:
    """All quantizers at each number of codes; `quick`, and without a GPU, of digits of 8 x 8 pixels."""
    changes = sizes_of(quick, SMALL | {"epochs": 25}, SMALL | {"epochs": 60})
    base, cells = replace(Cell("", 64), **changes), {}
    for codes in (64,) if changes else (1024, 4096, 16384):
        ways = {name: Cell(name, codes) for name in RELEASED}
        ways |= {text: Cell(text, codes) for text in ESTIMATORS}
        ways |= {
            "straight-through": Cell("straight-through", codes),
            "gapmax:draw=argmax": Cell("gapmax:draw=argmax", codes),
            "gapmax, linear": Cell("gapmax", codes, logits="linear"),
            "gapmax, equal use": Cell("gapmax", codes, usage=0.01),
            "gapmax:draw=argmax, equal use": Cell("gapmax:draw=argmax", codes, usage=0.01),
            # Ramesh et al. (2021) anneal to 1/16.
            "gumbel-softmax, annealed": Cell("gumbel-softmax", codes, tau=(1.0, 1 / 16)),
        }
        sizes = {name: getattr(base, name) for name in ("data", "epochs", "batch", "width", "size")}
        cells[f"{codes} codes"] = {label: replace(cell, **sizes) for label, cell in ways.items()}
    return cells


class Quantized(NamedTuple):
    entries: Tensor
    codes: Tensor
    loss: Tensor | float


class Released(nn.Module):
    """A layer of vector-quantize-pytorch, `(B, N, size)` to the same."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        require("a released quantizer", "vector_quantize_pytorch")
        import vector_quantize_pytorch as released

        kind, options = RELEASED[cell.way]
        sizes: dict[str, Any] = {"dim": cell.size, "codebook_size": cell.codes}
        if kind == "FSQ":
            sizes = {"dim": cell.size, "levels": list(FSQ_LEVELS[cell.codes])}
        self.layer = getattr(released, kind)(**sizes, **options)

    def forward(self, x: Tensor) -> Quantized:
        entries, index, *loss = self.layer(x)
        return Quantized(entries, index, loss[0].sum() if loss else 0.0)


class Choice(nn.Module):
    """A code drawn by an estimator: entries `(codes, size)`, and logits of a position's vector."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.estimator = resolve_pathwise(cell.way)
        # Of length 1 at first: the logits then begin near equal, whatever the number of codes.
        self.entries = nn.Parameter(torch.randn(cell.codes, cell.size) * cell.size**-0.5)
        self.linear = nn.Linear(cell.size, cell.codes) if cell.logits == "linear" else None
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.progress = 0.0

    def forward(self, x: Tensor) -> Quantized:
        logits = self.linear(x) if self.linear else self._nearness(x)
        if not self.training:
            index = logits.argmax(-1)
            return Quantized(self.entries[index], index, 0.0)
        choice = self._current().choose(logits)
        loss: Tensor | float = 0.0
        if self.cell.usage:
            use = logits.softmax(-1).flatten(0, -2).mean(0)
            loss = self.cell.usage * (use * (use * self.cell.codes).log()).sum()
        return Quantized(choice.select(self.entries), choice.index, loss)

    def _nearness(self, x: Tensor) -> Tensor:
        """Minus half the squared distance to each entry, at a scale that is learned; constants cancel."""
        products = x @ self.entries.T - self.entries.square().sum(-1) / 2
        return products * self.log_scale.exp()

    def _current(self) -> gapped.Pathwise:
        if self.cell.tau is None:
            return self.estimator
        first, last = self.cell.tau
        return replace(self.estimator, tau=first * (last / first) ** self.progress)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Tokenizer(nn.Module):
    """Images `(B, C, H, W)` to reconstructions, codes `(B, H/4 W/4)` and the quantizer's loss."""

    def __init__(self, cell: Cell, channels: int) -> None:
        super().__init__()
        width = cell.width
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            Residual(width),
            nn.Conv2d(width, width, 4, 2, 1),
            Residual(width),
            Residual(width),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, cell.size, 1),
        )
        self.quantizer = Released(cell) if cell.way in RELEASED else Choice(cell)
        self.decoder = nn.Sequential(
            nn.Conv2d(cell.size, width, 3, padding=1),
            Residual(width),
            Residual(width),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            Residual(width),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.ConvTranspose2d(width, channels, 4, 2, 1),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        features = self.encoder(images)
        entries, index, loss = self.quantizer(features.flatten(2).transpose(1, 2))
        return self.decoder(entries.transpose(1, 2).reshape(features.shape)), index, loss


class Features(nn.Module):
    """A fixed random convolutional network: distances between its features see edges and textures."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = (
            nn.Conv2d(channels, 32, 3, 1, 1, bias=False),
            nn.Conv2d(32, 64, 3, 2, 1, bias=False),
            nn.Conv2d(64, 128, 3, 2, 1, bias=False),
        )
        self.layers = nn.ModuleList(convolutions)
        generator = torch.Generator().manual_seed(0)
        for layer in convolutions:
            nn.init.kaiming_normal_(layer.weight, generator=generator)
        self.requires_grad_(False)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        total = a.new_zeros(len(a))
        for layer in self.layers:
            a, b = F.relu(layer(a)), F.relu(layer(b))
            total = total + (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).mean((1, 2))
        return total


def train(cell: Cell, seed: int) -> Iterator[dict[str, float]]:
    """Train one tokenizer, and yield its numbers on test images after each epoch."""
    with seeded(seed) as device:
        train_images, test_images = (images.to(device) for images in getattr(data, cell.data)())
        channels = train_images.shape[1]
        model = Tokenizer(cell, channels).to(device)
        # Convolutions on a GPU want channels last.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        features = Features(channels).to(device)
        each = len(train_images) // cell.batch
        draw = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(len(train_images), generator=draw) for _ in range(cell.epochs)])
        rows = orders[:, : each * cell.batch].reshape(-1, cell.batch).to(device)

        def losses(count: Tensor) -> Iterator[Tensor]:
            images = train_images[at(rows, count)].float() / 255
            if isinstance(model.quantizer, Choice):
                model.quantizer.progress = training.steps / len(rows)
            result, _, loss = model(images)
            yield F.mse_loss(result, images) + loss

        # Released layers look at values, which a recorded step may not.
        training = Training(model, losses, falling(cell.rate, len(rows)), recorded=False)
        for _ in range(cell.epochs):
            cost = training(each)
            yield {**_evaluate(model, features, test_images, cell), **cost}


@torch.no_grad()
def _evaluate(model: Tokenizer, features: Features, images: Tensor, cell: Cell) -> dict[str, float]:
    model.eval()
    squares, distances, codes = [], [], []
    for part in images.split(500):
        target = part.float() / 255
        result, index, _ = model(target)
        result = result.clamp(0, 1)
        squares.append((result - target).square().mean((1, 2, 3)))
        distances.append(features.distance(result, target))
        codes.append(index.flatten())
    use = torch.bincount(torch.cat(codes).long(), minlength=cell.codes).double()
    use = use / use.sum()
    entropy = -(use * use.clamp_min(1e-300).log()).sum()
    return {
        "mse": torch.cat(squares).mean().item(),
        "features": torch.cat(distances).mean().item(),
        "perplexity": entropy.exp().item(),
        "used": (use > 0).double().mean().item(),
    }
