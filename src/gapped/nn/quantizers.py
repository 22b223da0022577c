"""A vector quantizer as a module: one code for each group, and its entry in a codebook."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from gapped import simplex
from gapped.checks import check_count, check_level, check_tensor
from gapped.choice import with_points
from gapped.errors import reject
from gapped.nn.layers import Estimated
from gapped.pathwise import Pathwise


class Quantized(NamedTuple):
    """What `gapped.nn.Quantizer` returns, and the numbers that losses need of it.

    Arguments:
        entries: Entries of the codebook, of the shape of the quantizer's input with `out_features` numbers in
            place of `in_features`.
        indices: The codes, int64: `(*positions)` for one group, else `(*positions, G)`.
        logits: `(*positions, G, K)`.

    A *position* is one vector of the input. In the methods, p is the softmax of a position's logits and p̄
    its average over positions, for each of the G groups of K codes. A boolean `mask` of the shape of the
    positions, such as wav2vec2's mask of time steps, says which positions count.
    """

    entries: Tensor
    indices: Tensor
    logits: Tensor

    def prob_perplexity(self, mask: Tensor | None = None) -> Tensor:
        """The sum over groups of `exp H(p̄)`: from `G` to `G K`.

        wav2vec2's diversity loss is `1 - prob_perplexity(mask) / (G * K)`.
        """
        return _perplexity(self._mean(torch.softmax(simplex.computed(self.logits), -1), mask))

    def code_perplexity(self, mask: Tensor | None = None) -> Tensor:
        """`prob_perplexity` with the codes that were taken in the place of `p`; it has no gradient."""
        shape, dtype = self.logits.shape, simplex.computed(self.logits).dtype
        return _perplexity(self._mean(simplex.one_hot(self.indices.view(shape[:-1]), shape[-1], dtype), mask))

    def divergence(self, mask: Tensor | None = None) -> Tensor:
        """The average of `KL(p ‖ uniform)`, summed over groups, in nats."""
        log_p = torch.log_softmax(simplex.computed(self.logits), -1)
        return self._mean(log_p.exp() * (log_p + math.log(log_p.shape[-1])), mask).sum()

    def _mean(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """`(*positions, G, K)` to `(G, K)`."""
        positions, rows = values.shape[:-2], values.reshape(-1, *values.shape[-2:])
        if mask is None:
            return rows.mean(0)
        if mask.dtype != torch.bool or mask.shape != positions:
            accepted = f"a boolean tensor of the shape of the positions, {tuple(positions)}"
            raise reject("mask", f"one of {mask.dtype} and shape {tuple(mask.shape)}", accepted)
        return torch.where(mask.reshape(-1, 1, 1), rows, 0.0).sum(0) / mask.sum()


# Else `torch.export.save` refuses a model that returns one.
_pytree._register_namedtuple(Quantized, serialized_type_name="gapped.nn.Quantized")


def _perplexity(p: Tensor) -> Tensor:
    # Not xlogy, whose slope at 0 is infinite: a code that is never likely would make every gradient NaN.
    return (-(p * torch.where(p > 0, p, 1.0).log()).sum(-1)).exp().sum()


class Quantizer(Estimated):
    """Vector quantizer with random codes, as in wav2vec 2.0 and in discrete VAEs.

    A linear map gives each position `groups` rows of logits over `codes` codes. The estimator draws one code
    a group; in eval mode the most likely one is taken, without a gradient for the logits. The result is the
    codes' entries, of `out_features / groups` numbers each, side by side, in a `gapped.nn.Quantized`.

    Arguments:
        in_features: Length of the vectors to quantize.
        out_features: Length of the result, a multiple of `groups`.
        codes: How many codes each group has.
        groups: How many codes are drawn for each vector.
        estimator: An object or its text; None is the recommended default. With `hard=False` entries are mixed
            in training, as DALL-E's discrete VAE does, and `indices` are the largest parts of the mixtures.
        dim: The axis of the features: -1 for `(..., in_features)`, 1 for images `(B, in_features, H, W)`.
        schedule: `(start, end, factor)`, such as wav2vec 2.0's `(2, 0.5, 0.999995)`. Then `set_step(n)`,
            called by the training loop, sets the temperature to `max(start * factor**n, end)`. With or
            without it, `layer.tau = 0.7` sets the temperature too. It is not part of the state dict.

    Parameters of the module: `projection`, a `torch.nn.Linear`, and `codebook`, `(groups, codes, out_features
    / groups)`. Weights start normal, of variance 1 / `in_features`, without bias, so that no code is certain
    for inputs of variance 1; wav2vec 2.0's have variance 1. Entries start uniform in [0, 1), as theirs.

    >>> layer = Quantizer(16, 8, codes=320, groups=2, estimator="gst:tau=0.5")
    >>> result = layer(torch.randn(4, 50, 16))
    >>> result.entries.shape, result.indices.shape
    (torch.Size([4, 50, 8]), torch.Size([4, 50, 2]))
    >>> bool(2 <= result.prob_perplexity() <= 640)
    True

    References: Baevski, Zhou, Mohamed, Auli (2020) for wav2vec 2.0; Ramesh et al. (2021) for DALL-E.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        codes: int,
        groups: int = 1,
        estimator: Pathwise | str | None = None,
        dim: int = -1,
        schedule: tuple[float, float, float] | None = None,
    ) -> None:
        for name, count in (("in_features", in_features), ("codes", codes), ("groups", groups)):
            check_count(name, count)
        check_count("out_features", out_features)
        if out_features % groups:
            raise reject("out_features", out_features, f"a multiple of groups, {groups}")
        if schedule is not None:
            _check_schedule(schedule)
        super().__init__(estimator)
        self.in_features, self.dim, self.schedule = in_features, dim, schedule
        self.projection = torch.nn.Linear(in_features, groups * codes)
        self.codebook = torch.nn.Parameter(torch.empty(groups, codes, out_features // groups))
        torch.nn.init.normal_(self.projection.weight, std=in_features**-0.5)
        torch.nn.init.zeros_(self.projection.bias)
        torch.nn.init.uniform_(self.codebook)
        if schedule is not None:
            self.set_step(0)

    def set_step(self, step: int) -> None:
        """Set the temperature that the schedule has after so many steps of training."""
        if self.schedule is None:
            raise reject("schedule", None, "(start, end, factor); or set layer.tau itself")
        check_count("step", step, least=0)
        start, end, factor = self.schedule
        self.tau = max(start * factor**step, end)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize each vector of `x`.

        Arguments:
            x: Vectors to quantize, with `in_features` numbers each on the axis `dim` of the module.
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            A `gapped.nn.Quantized`, with entries of the codebook, their indices, and the logits. In eval mode
            the indices are those of the largest logits, and nothing carries a gradient to them.
        """
        accepted = f"{self.in_features} features on axis {self.dim}"
        check_tensor("x", x, accepted)
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] != self.in_features:
            raise reject("x", f"a tensor of shape {tuple(x.shape)}", accepted)
        groups, codes, _ = self.codebook.shape
        logits = self.projection(x.movedim(self.dim, -1)).unflatten(-1, (groups, codes))
        if not self.training:
            index = simplex.argmax_index(logits.detach())
            entries = with_points(logits.detach(), index, None).select(self.codebook)
        elif self.estimator.hard:
            choice = self.estimator.choose(logits, generator=generator)
            index, entries = choice.index, choice.select(self.codebook)
        else:
            sample = self.estimator.sample(logits, generator=generator)
            index = simplex.argmax_index(sample.detach())
            entries = torch.einsum("...gk,gkd->...gd", sample, self.codebook)
        index = index.squeeze(-1) if groups == 1 else index
        return Quantized(entries.flatten(-2).movedim(-1, self.dim), index, logits)

    def extra_repr(self) -> str:
        groups, codes, width = self.codebook.shape
        return f"codes={codes}, groups={groups}, width={width}, estimator={self.estimator}, dim={self.dim}"


def _check_schedule(schedule: tuple[float, float, float]) -> None:
    accepted = "(start, end, factor) with start >= end > 0 and 0 < factor <= 1"
    if not isinstance(schedule, tuple | list) or len(schedule) != 3:
        raise reject("schedule", schedule, accepted)
    for name, number in zip(("start", "end", "factor"), schedule, strict=True):
        check_level(f"schedule: {name}", number, positive=True)
    start, end, factor = schedule
    if start < end or factor > 1:
        raise reject("schedule", schedule, accepted)
