"""The VAE as a fleet's task: batches, losses, test bound, gradient variance, pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gapped.diagnostics.moments import Moments
from gapped.errors import reject
from gapped.lab.data.sources import Dataset
from gapped.lab.fleet.capture import Captured
from gapped.lab.fleet.grouping import Grouped
from gapped.lab.fleet.layers import generators, spread
from gapped.lab.fleet.stateful import Widths
from gapped.lab.fleet.trainer import Task, permutation
from gapped.lab.tasks.vae.model import VAE
from gapped.lab.tasks.vae.protocol import Protocol

_TEST_CHUNK = 500
_PICTURES = 10


class VAETask(Task):
    """R VAEs with the data on the device; each run has its own order of the images."""

    row_axes = 2
    loss_name = "negative_elbo"
    model: VAE

    def __init__(
        self,
        protocol: Protocol,
        data: Dataset,
        seeds: Sequence[int],
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        split: str = "test",
    ) -> None:
        if len(data.train) < protocol.batch:
            raise reject("train_images", len(data.train), f"at least one batch of {protocol.batch}")
        self.protocol, self.seeds, self.scale = protocol, list(seeds), data.scale
        self._dtype = dtype
        self.height, self.width, self.split = data.height, data.width, split
        self.train, self.test = data.train.to(device), data.test.to(device)
        self._distinct = sorted(set(self.seeds))
        self._places = [self._distinct.index(seed) for seed in self.seeds]
        mean = data.train.double().mean(0).div(data.scale).to(torch.get_default_dtype())
        made = VAE(protocol, self.train.shape[1], generators(self._distinct), mean)
        self.model = made.to(device, dtype)
        spread(self.model, self._places)
        if compiled:
            self.model.compile_parts()
        self._chosen = torch.compile(chosen, dynamic=False) if compiled else chosen
        self.steps = len(self.train) // protocol.batch
        self.batch = torch.zeros(len(self.seeds), protocol.batch, dtype=torch.int64, device=device)
        self.order = self.batch
        self.widths = Widths(self.train.shape[1], protocol.latents * protocol.categories)
        if protocol.prior_rate is not None:
            self.descended = [(self.model.prior, protocol.prior_rate)]
        self._gradients: _GradientMoments | None = None

    def start_epoch(self, epoch: int) -> None:
        orders = torch.stack([permutation(len(self.train), seed, epoch) for seed in self._distinct])
        self.order = orders.to(self.batch.device)[self._places]

    def load_batch(self, step: int) -> None:
        size = self.protocol.batch
        self.batch.copy_(self.order[:, step * size : (step + 1) * size])

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        images = self._shown(self._chosen(self.train, self.batch, self.scale, self._dtype), generator)
        return self.model.loss(images, sampler, generator).mean(1)

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        """The test bound over all test images: of one sample, or importance-weighted if of several."""
        samples = self.protocol.bound_samples
        name = "negative_elbo" if samples == 1 else f"{samples}_sample_negative_elbo"
        total = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.batch.device)
        for chunk in torch.split(self.test, _TEST_CHUNK):
            images = self.pixels(chunk.expand(len(self.seeds), -1, -1), generator)
            if samples == 1:
                bound = self.model.loss(images, sampler, generator)
            else:
                bound = self.model.bound(images, sampler, generator, samples)
            total += bound.double().sum(1)
        return {f"{self.split}_{name}": total / len(self.test)}

    def pixels(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Grey levels in [0, 1], or Bernoulli draws from them."""
        return self._shown(grey_levels(images, self.scale, self._dtype), generator)

    def _shown(self, grey: Tensor, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(grey, generator=generator) if self.protocol.binarised else grey

    def gradient_variance(
        self, sampler: Grouped, generator: torch.Generator, samples: int, examples: int
    ) -> Tensor:
        """Variance of the loss gradient per encoder weight, averaged over the weights, of each run.

        `samples` gradients on one batch, the first `examples` test images (the paper's variance figure).
        """
        known = self._gradients
        if known is None or not known.serves(sampler, generator, examples):
            known = self._gradients = _GradientMoments(self, sampler, generator, examples)
        return known.measure(samples)

    def surrogate_entropy(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """Mean entropy of the surrogate on the loaded batch, in nats, of each run; `sampler` is soft."""
        with torch.no_grad():
            images = self.pixels(self.train[self.batch], generator)
            soft = sampler.sample(self.model.encode(images), generator=generator)
            entropy: Tensor = torch.special.entr(soft)
            return entropy.sum(-1).mean((1, 2))

    def pictures(self, sampler: Grouped, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        """Test images, their reconstructions and samples from the prior, uint8 ``(R, count, pixels)``."""
        with torch.no_grad():
            grey = self.pixels(self.test[:count].expand(len(self.seeds), -1, -1), generator)
            logits = self.model.encode(grey)
            reconstruction = self.model.decode(sampler.sample(logits, generator=generator)).sigmoid()
            prior = self.model.log_prior() + torch.zeros_like(logits)
            sample = self.model.decode(sampler.sample(prior, generator=generator)).sigmoid()
        images = {"original": grey, "reconstruction": reconstruction, "sample": sample}
        return {name: (255 * each).round().to(torch.uint8).cpu() for name, each in images.items()}

    def show(
        self, sampler: Grouped, generator: torch.Generator, places: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """A few `pictures` of each run, base64-encoded."""
        pictures = self.pictures(sampler, generator, _PICTURES)
        for place in places:
            encoded = {
                name: base64.b64encode(bytes(each[place].flatten().tolist())).decode()
                for name, each in pictures.items()
            }
            yield {"height": self.height, "width": self.width, "count": _PICTURES, **encoded}


def grey_levels(images: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    """Images in [0, 1].

    A compiler multiplies by 1 / scale, so a grey level may differ from a quotient in its last place.
    """
    return images.to(dtype) / scale


def chosen(images: Tensor, batch: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    """The grey levels of some images; compiled, they are read and written once."""
    return grey_levels(images[batch], scale, dtype)


class _GradientMoments:
    """Moments of the encoder's gradient on a fixed batch."""

    def __init__(self, task: VAETask, sampler: Grouped, generator: torch.Generator, images: int) -> None:
        self.task, self.sampler, self.generator = task, sampler, generator
        self.images = task.test[:images].expand(len(task.seeds), -1, -1)
        self.weights = list(task.model.encoder.parameters())
        self.moments = [Moments(weight) for weight in self.weights]
        state = [tensor for moments in self.moments for tensor in moments.tensors()]
        self._add = Captured(self._add_one, generator, lambda: state)

    def serves(self, sampler: Grouped, generator: torch.Generator, images: int) -> bool:
        """Whether this was made for the same measurement, so that what it recorded can be used again."""
        same = sampler is self.sampler and generator is self.generator
        return same and self.images.shape[1] == min(images, len(self.task.test))

    def measure(self, samples: int) -> Tensor:
        for moments in self.moments:
            moments.reset()
        for _ in range(samples):
            self._add()
        runs = len(self.task.seeds)
        variances = torch.cat([moments.variance.reshape(runs, -1) for moments in self.moments], 1)
        return variances.mean(1)

    def _add_one(self) -> None:
        images = self.task.pixels(self.images, self.generator)
        with self.sampler.frozen():
            loss = self.task.model.loss(images, self.sampler, self.generator).mean(1)
        for moments, gradient in zip(
            self.moments, torch.autograd.grad(loss.sum(), self.weights), strict=True
        ):
            moments.add(gradient)
