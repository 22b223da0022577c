"""The discrete variational autoencoder: the model, and its task for a fleet."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.diagnostics.moments import Moments
from gapped.errors import reject
from gapped.gradient import with_gradient
from gapped.score import pullback
from gapped_lab.data.images import Dataset
from gapped_lab.fleet import Task, permutation
from gapped_lab.fleet.capture import Captured
from gapped_lab.fleet.estimator_groups import Grouped, Part, Widths
from gapped_lab.fleet.optimizer import Adaptation
from gapped_lab.fleet.run_layers import Linear, affine, generators, spread
from gapped_lab.tasks import VAEProtocol

# How close to 0 and 1 the mean image may come before its logit is taken.
_CLIP = 1e-3
# The most images that are tested together, and the most entries of their samples in all runs.
_TEST_CHUNK, _TEST_NUMBERS = 500, 2**28
_PICTURES = 10

Weights = Sequence[tuple[Tensor, Tensor]]


class VAE(torch.nn.Module):
    r"""R variational autoencoders with categorical latents, side by side.

    For an image :math:`x` with pixels in [0, 1] the negative evidence lower bound is

    .. math:: \mathbb E_{z \sim q(z|x)}\Big[\sum_i \mathrm{BCE}(x_i, \hat x_i(z))\Big]
              + \sum_l \sum_k q_{lk} \log (q_{lk} K),

    with the uniform prior's divergence in closed form; the expectation is the estimator's. A protocol may
    have the divergence sampled instead, as :math:`\log q(z|x) - \log p(z)` within the expectation, and
    train the prior :math:`p`. `mean` is the mean training image, for protocols that use it.
    """

    def __init__(
        self, protocol: VAEProtocol, pixels: int, runs: Sequence[torch.Generator], mean: Tensor | None = None
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self.encoder, self.decoder = _layers(protocol, pixels, runs)
        if protocol.selects:
            start = [torch.randn(1, protocol.latents, pixels, generator=each) for each in runs]
            self.choice = torch.nn.Parameter(0.1 * torch.stack(start))
        if protocol.prior_rate is not None:
            shape = (len(runs), 1, protocol.latents, protocol.categories)
            self.prior = torch.nn.Parameter(torch.zeros(shape))
        if protocol.centred:
            assert mean is not None
            self.register_buffer("mean", mean.clone())
        if protocol.mean_output:
            assert mean is not None
            with torch.no_grad():
                self.decoder[-1].bias.copy_(mean.clamp(_CLIP, 1 - _CLIP).logit())  # type: ignore[operator]
        self._training = (self.posterior, self.costs, self.costs_and_slopes)

    def encode(self, x: Tensor) -> Tensor:
        """Logits ``(R, B, latents, categories)`` of images ``(R, B, pixels)``."""
        rules = self.protocol
        if rules.selects:
            return self.choice.expand(-1, x.shape[1], -1, -1)
        if rules.centred:
            x = x - self.mean  # type: ignore[operator]
        logits = self._stack(weights(self.encoder), patches(x, rules.patch) if rules.patch else x)
        if rules.rectified_logits:
            logits = logits.relu()
        return logits.view(*x.shape[:2], rules.latents, rules.categories)

    def decode(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Pixel logits ``(R, B, pixels)`` of samples ``(R, B, latents, categories)``, selected from `x`."""
        return self._pixels(z.unsqueeze(0), x, weights(self.decoder)).squeeze(1)

    @property
    def choices(self) -> int:
        """Entries of the logits of an image."""
        rules = self.protocol
        return rules.latents * (self.choice.shape[-1] if rules.selects else rules.categories)

    @property
    def encoder_weights(self) -> list[Tensor]:
        """The weights that the logits depend on."""
        return [self.choice] if self.protocol.selects else list(self.encoder.parameters())

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the images' latents, and their KL to the uniform prior, ``(R, B)``; 0 for a selection.

        Where the divergence is sampled, in place of it log q - log p of every category, ``(R, B, latents,
        categories)``. Its own derivative with respect to q is zero in the mean, and is left out.
        """
        logits = self.encode(x)
        if self.protocol.selects:
            return logits, logits.new_zeros(())
        log_q = logits.log_softmax(-1)
        if self.protocol.sampled_divergence:
            return logits, log_q.detach() - self.log_prior()
        divergence = (log_q.exp() * (log_q + math.log(self.protocol.categories))).sum((-2, -1))
        return logits, divergence

    def reconstruction(self, z: Tensor, x: Tensor) -> Tensor:
        """Bernoulli cross-entropy of the pixels, ``(R, B)``."""
        return self.costs(z.unsqueeze(0), x, weights(self.decoder)).squeeze(0)

    def log_prior(self) -> Tensor | float:
        """The logarithm of the prior, ``(R, 1, latents, categories)``, or of 1/K if it is uniform."""
        if self.protocol.prior_rate is None:
            return -math.log(self.protocol.categories)
        return self.prior.log_softmax(-1)

    def costs(self, z: Tensor, x: Tensor, decoder: Weights, ratio: Tensor | None = None) -> Tensor:
        """Cross-entropies ``(n, r, B)`` of several samples ``(n, r, B, latents, categories)`` of r runs.

        With the `ratio` of those runs, log q - log p of every category, the whole negative ELBO.
        """
        pixels = self._pixels(z, x, decoder)
        target = x.unsqueeze(1).expand_as(pixels)
        entropy = F.binary_cross_entropy_with_logits(pixels, target, reduction="none").sum(-1)
        cost = entropy.transpose(0, 1)
        return cost if ratio is None else cost + (z * ratio).sum((-2, -1))

    def costs_and_slopes(self, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """`costs`, and their slopes at the samples `z`: in one program, which computes no others.

        Compiled code that autograd differentiates has the gradients of all weights computed each time.
        """
        costs, pull = pullback(lambda z: self.costs(z, *rest), z)
        return costs, pull(torch.ones_like(costs)).detach()

    def loss(self, x: Tensor, sampler: Grouped, generator: torch.Generator | None = None) -> Tensor:
        """Negative evidence lower bound of each image, ``(R, B)``."""
        plain = (self.posterior, self.costs, self.costs_and_slopes)
        posterior, costs, costs_and_slopes = self._training if torch.is_grad_enabled() else plain
        logits, divergence = posterior(x)
        parts = sampler.parts()
        decoders = dict(zip(parts, shares(weights(self.decoder), parts), strict=True))
        sampled = self.protocol.sampled_divergence
        ratios = dict(zip(parts, split(divergence, parts), strict=True)) if sampled else {}

        def cost(z: Tensor, part: Part) -> Tensor:
            rest = (x if len(parts) == 1 else x[part.runs], decoders[part], ratios.get(part))
            if part.derivatives == 1 and z.requires_grad:
                values, slopes = costs_and_slopes(z.detach(), *rest)
                return with_gradient(values, z, slopes)
            # Compiled code has no second derivative.
            return (self.costs if part.derivatives > 1 else costs)(z, *rest)

        expected = sampler.expectation(cost, logits, generator, x)
        return expected if sampled else expected + divergence

    def bound(self, x: Tensor, sampler: Grouped, generator: torch.Generator, samples: int) -> Tensor:
        """The importance-weighted bound on -log p(x) with `samples` samples of each image, ``(R, B)``."""
        logits = self.encode(x)
        ratio, decoder = logits.log_softmax(-1) - self.log_prior(), weights(self.decoder)
        total = torch.full(x.shape[:2], -torch.inf, dtype=x.dtype, device=x.device)
        for _ in range(samples):
            z = sampler.sample(logits, generator=generator)
            total = torch.logaddexp(total, -self.costs(z.unsqueeze(0), x, decoder, ratio).squeeze(0))
        return math.log(samples) - total

    def sample(self, logits: Tensor, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """A sample of each run, in the shape of `logits`."""
        return sampler.sample(logits, generator=generator)

    def compile_training(self) -> None:
        """Compile `posterior` and the costs for training; the sampler stays outside, with its generator."""
        compiled = (torch.compile(each, dynamic=False) for each in self._training)
        self._training = tuple(compiled)  # type: ignore[assignment]

    def _pixels(self, z: Tensor, x: Tensor | None, decoder: Weights) -> Tensor:
        """Pixel logits ``(r, n, B, pixels)`` of samples ``(n, r, B, latents, categories)``."""
        n, runs, size = z.shape[:3]
        rules = self.protocol
        if rules.selects:
            assert x is not None
            z = (z * x.unsqueeze(-2)).sum(-1)
        # Samples count as more images of the batch in the products.
        folded = z.transpose(0, 1).reshape(runs, n * size, -1)
        if not rules.patch:
            return self._stack(decoder, 2 * folded - 1 if rules.signed else folded).view(runs, n, size, -1)
        side = math.isqrt(rules.latents)
        # The first layer looks a vector up for each cell; no activation follows it.
        cells = affine(folded.view(runs, -1, rules.categories), *decoder[0])
        grid = cells.view(runs, n * size, side, side, -1)
        return join_patches(self._stack(decoder[1:], grid), rules.patch).view(runs, n, size, -1)

    def _stack(self, layers: Weights, x: Tensor) -> Tensor:
        """All layers, on ``(R, B, C)`` or, as convolutions where one takes that many inputs, on grids."""
        for place, (weight, bias) in enumerate(layers):
            if place:
                x = F.leaky_relu(x, self.protocol.slope) if self.protocol.slope else x.relu()
            if x.shape[-1] != weight.shape[1]:
                x = neighbourhoods(x)
            x = affine(x.flatten(1, -2), weight, bias).view(*x.shape[:-1], -1)
        return x


def _layers(
    rules: VAEProtocol, pixels: int, runs: Sequence[torch.Generator]
) -> tuple[torch.nn.ModuleList, torch.nn.ModuleList]:
    """Encoder and decoder, mirrored: dense, or convolutions between the patches of an image."""
    widths = [pixels, *rules.hidden, rules.latents * rules.categories]
    areas = [1] * (len(widths) - 1)
    if rules.selects:
        widths[-1] = rules.latents
    if rules.patch:
        if (math.isqrt(rules.latents) * rules.patch) ** 2 != pixels:
            size = math.isqrt(pixels)
            accepted = f"images of {rules.latents} patches of {rules.patch}x{rules.patch} pixels"
            raise reject("data", f"images of {size}x{size} pixels", f"{accepted} for {rules.name}")
        widths[0], widths[-1] = rules.patch**2, rules.categories
        areas = [9] * len(rules.hidden) + [1]
    ends = list(zip(pairwise(widths), areas, strict=True))

    def make(sizes: Iterable[tuple[int, int]]) -> torch.nn.ModuleList:
        return torch.nn.ModuleList(Linear(a, b, runs, glorot=rules.glorot) for a, b in sizes)

    encoder = make((a * area, b) for (a, b), area in ends)
    decoder = make((b * area, a) for (a, b), area in reversed(ends))
    if rules.patch:
        # The first layer of the decoder is a look-up: one category of each cell is its only input.
        with torch.no_grad():
            decoder[0].weight.mul_(math.sqrt(rules.categories))  # type: ignore[operator]
    return (torch.nn.ModuleList() if rules.selects else encoder), decoder


def patches(x: Tensor, size: int) -> Tensor:
    """Square images ``(R, B, pixels)`` as grids of patches, ``(R, B, side, side, size * size)``."""
    side = math.isqrt(x.shape[-1]) // size
    return x.view(*x.shape[:2], side, size, side, size).transpose(3, 4).flatten(-2)


def join_patches(x: Tensor, size: int) -> Tensor:
    """The images ``(R, B, pixels)`` of grids of patches: the inverse of `patches`."""
    return x.view(*x.shape[:-1], size, size).transpose(3, 4).flatten(2)


def neighbourhoods(x: Tensor) -> Tensor:
    """Each cell of a grid ``(R, B, side, side, C)`` with the eight around it, zeros outside; ``9 C`` wide."""
    side = x.shape[2]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    return torch.cat([padded[:, :, i : i + side, j : j + side] for i in range(3) for j in range(3)], -1)


def weights(layers: torch.nn.ModuleList) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer."""
    return [(layer.weight, layer.bias) for layer in layers]  # type: ignore[misc]


def shares(weights: Weights, parts: Sequence[Part]) -> list[Weights]:
    """The weights of each part's runs, by one split, whose gradient is written once, in one piece."""
    pieces = [(split(weight, parts), split(bias, parts)) for weight, bias in weights]
    return [[(weight[i], bias[i]) for weight, bias in pieces] for i in range(len(parts))]


def split(x: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The runs of each part."""
    return (x,) if len(parts) == 1 else torch.split(x, [len(part) for part in parts])


class VAETask(Task):
    """R VAEs with the data on the device; each run has its own order of the images."""

    row_axes = 2
    model_type: type[VAE] = VAE
    model: VAE

    def __init__(
        self,
        protocol: VAEProtocol,
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
        self.loss_name = "cross_entropy" if protocol.selects else "negative_elbo"
        self._dtype = dtype
        self.height, self.width, self.split = data.height, data.width, split
        self.train, self.test = data.train.to(device), data.test.to(device)
        self.adaptation = Adaptation(protocol.rectified_adam, protocol.weight_decay)
        if protocol.binarised == "once":
            self.train, self.test = (
                each.to(device) for each in binarise((data.train, data.test), data.scale)
            )
        self._distinct = sorted(set(self.seeds))
        self._places = [self._distinct.index(seed) for seed in self.seeds]
        mean = data.train.double().mean(0).div(data.scale).to(torch.get_default_dtype())
        model = self.model_type(protocol, self.train.shape[1], generators(self._distinct), mean)
        self.model = model.to(device, dtype)
        spread(self.model, self._places)
        if compiled:
            self.model.compile_training()
        self._images_at = torch.compile(images_at, dynamic=False) if compiled else images_at
        self.steps = len(self.train) // protocol.batch
        self.batch = torch.zeros(len(self.seeds), protocol.batch, dtype=torch.int64, device=device)
        self.order = self.batch
        self.widths = Widths(self.train.shape[1], self.model.choices)
        if protocol.prior_rate is not None:
            self.descended = [(self.model.prior, protocol.prior_rate)]
        # Measurements are repeated after every epoch, and recorded as a graph once.
        self._gradients: dict[tuple[int, ...], _GradientMoments] = {}

    def start_epoch(self, epoch: int) -> None:
        orders = torch.stack([permutation(len(self.train), seed, epoch) for seed in self._distinct])
        self.order = orders.to(self.batch.device)[self._places]

    def load_batch(self, step: int) -> None:
        size = self.protocol.batch
        self.batch.copy_(self.order[:, step * size : (step + 1) * size])

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        grey = self._images_at(self.train, self.batch, self.scale, self._dtype)
        return self.model.loss(self._binarise(grey, generator), sampler, generator).mean(1)

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        """The test bound over all test images: of one sample, or importance-weighted if of several."""
        samples = self.protocol.bound_samples
        name = self.loss_name if samples == 1 else f"{samples}_sample_{self.loss_name}"
        total = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.batch.device)
        numbers = len(self.seeds) * self.model.choices
        for chunk in torch.split(self.test, max(min(_TEST_CHUNK, _TEST_NUMBERS // numbers), 1)):
            images = self.pixels(chunk.expand(len(self.seeds), -1, -1), generator)
            if samples == 1:
                bound = self.model.loss(images, sampler, generator)
            else:
                bound = self.model.bound(images, sampler, generator, samples)
            total += bound.double().sum(1)
        return {f"{self.split}_{name}": total / len(self.test)}

    def pixels(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Grey levels in [0, 1], or Bernoulli draws from them."""
        return self._binarise(grey_levels(images, self.scale, self._dtype), generator)

    def _binarise(self, grey: Tensor, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(grey, generator=generator) if self.protocol.binarised is True else grey

    def gradient_variance(
        self, sampler: Grouped, generator: torch.Generator, samples: int, examples: int
    ) -> Tensor:
        """Variance of the loss gradient per encoder weight, averaged over the weights, of each run.

        `samples` gradients on one batch, the first `examples` test images (the paper's variance figure).
        """
        key = (id(sampler), id(generator), examples)
        if key not in self._gradients:
            self._gradients[key] = _GradientMoments(self, sampler, generator, examples)
        return self._gradients[key].measure(samples)

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
            reconstruction = self.model.decode(self.model.sample(logits, sampler, generator), grey).sigmoid()
            prior = self.model.log_prior() + torch.zeros_like(logits)
            sample = self.model.decode(self.model.sample(prior, sampler, generator), grey).sigmoid()
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


def binarise(images: Sequence[Tensor], scale: int) -> Iterator[Tensor]:
    """Black and white images: Bernoulli draws of the grey levels, the same at every call."""
    noise = torch.Generator().manual_seed(0)
    for each in images:
        drawn = torch.bernoulli(grey_levels(each, scale, torch.float32), generator=noise)
        yield scale * drawn.to(each.dtype)


def grey_levels(images: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    """Images in [0, 1].

    A compiler multiplies by 1 / scale, so a grey level may differ from a quotient in its last place.
    """
    return images.to(dtype) / scale


def images_at(images: Tensor, batch: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    """The grey levels of the images of a batch; compiled, they are read and written once."""
    return grey_levels(images[batch], scale, dtype)


class _GradientMoments:
    """Moments of the encoder's gradient on a fixed batch."""

    def __init__(self, task: VAETask, sampler: Grouped, generator: torch.Generator, images: int) -> None:
        self.task, self.sampler, self.generator = task, sampler, generator
        self.images = task.test[:images].expand(len(task.seeds), -1, -1)
        self.weights = task.model.encoder_weights
        self.moments = [Moments(weight) for weight in self.weights]
        state = [tensor for moments in self.moments for tensor in moments.tensors()]
        self._add = Captured(self._add_one, generator, lambda: state)

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
        with self.sampler.freeze():
            loss = self.task.model.loss(images, self.sampler, self.generator).mean(1)
        for moments, gradient in zip(
            self.moments, torch.autograd.grad(loss.sum(), self.weights), strict=True
        ):
            moments.add(gradient)
