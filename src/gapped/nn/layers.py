"""Modules that sample: one of several categories, gates, or masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_level
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.pathwise.gst import GST
from gapped.pathwise.straight_through import StraightThrough
from gapped.subsets.subset_sampling import check_groups, nm_mask

# The most likely outcome: of the estimators, the one whose gradient, which is not wanted here, has no noise.
_MODE = StraightThrough(draw="argmax")


class Estimated(torch.nn.Module):
    """A module with an estimator, whose temperature may be set.

    Options of the estimator that are a `torch.nn.Parameter` are parameters of the module, by their own name.
    """

    _given: Pathwise

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.estimator = estimator

    def __setattr__(self, name: str, value: Any) -> None:
        # Module's own would register a Parameter without a word to the property of that name.
        if name in ("estimator", "tau"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def estimator(self) -> Pathwise:
        """The estimator, with the parameters that the module holds now."""
        held: dict[str, Any] = {
            name: self._parameters[name] for name in self._given.levels if name in self._parameters
        }
        # What moves a module or calls it with other parameters may put new tensors in their place.
        if any(getattr(self._given, name) is not level for name, level in held.items()):
            return replace(self._given, **held)
        return self._given

    @estimator.setter
    def estimator(self, given: Any) -> None:
        estimator = self._resolve(given)
        for name in estimator.levels:
            self._parameters.pop(name, None)
            level = getattr(estimator, name)
            if isinstance(level, torch.nn.Parameter):
                self._parameters[name] = level
        self._given = estimator

    def _resolve(self, given: Any) -> Pathwise:
        return resolve_pathwise(given)

    @property
    def tau(self) -> float | Tensor:
        """The temperature of the estimator."""
        return self.estimator.tau

    @tau.setter
    def tau(self, tau: float | Tensor) -> None:
        self.estimator = replace(self.estimator, tau=tau)


class _Sampler(Estimated):
    """The rule of eval mode: to sample as well, or to take the mode."""

    def __init__(
        self, estimator: Pathwise | str | None = None, *, eval: Literal["sample", "argmax"] = "sample"
    ) -> None:
        super().__init__(estimator)
        if eval not in ("sample", "argmax"):
            raise reject("eval", eval, "'sample' or 'argmax'")
        self.eval_mode = eval

    @property
    def _takes_mode(self) -> bool:
        return self.eval_mode == "argmax" and not self.training

    def extra_repr(self) -> str:
        return f"{self.estimator}, eval={self.eval_mode!r}"


@documented
class Sample(_Sampler):
    """Module that samples one category per row.

    In eval mode it samples as well, or takes the most likely category. Its temperature may be set while
    training, `layer.tau = 0.5`, as `gapped.nn.schedules` do. The module has no parameters, unless the
    temperature is one, as in `Sample(gapped.GumbelSoftmax(torch.nn.Parameter(torch.tensor(1.0))))`.

    Arguments:
        dim: The category axis of the logits.
        eval: The rule of eval mode: "sample" as in training, or "argmax", without a gradient.

    >>> layer = Sample(eval="argmax").eval()
    >>> layer(torch.tensor([0.1, 0.7, 0.2]))
    tensor([0., 1., 0.])
    """

    def __init__(
        self,
        estimator: Pathwise | str | None = None,
        *,
        dim: int = -1,
        eval: Literal["sample", "argmax"] = "sample",
    ) -> None:
        super().__init__(estimator, eval=eval)
        self.dim = dim

    @documented
    def forward(
        self, logits: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Sample one category per row.

        Returns:
            A tensor of the shape and dtype of `logits`, with one-hot rows unless the estimator is soft.
        """
        if not self._takes_mode:
            return self.estimator.sample(logits, dim=self.dim, mask=mask, generator=generator)
        with torch.no_grad():
            return _MODE.sample(logits, dim=self.dim, mask=mask, generator=generator)

    def extra_repr(self) -> str:
        return f"{self.estimator}, dim={self.dim}, eval={self.eval_mode!r}"


@documented
class Gate(_Sampler):
    """Module that draws gates, zeros and ones, as `gapped.gate` does.

    In eval mode it draws as well, or takes the likelier value. Its temperature may be set while training:
    `layer.tau = 0.5`. The module has no parameters, unless the temperature is one.

    Arguments:
        eval: The rule of eval mode: "sample" as in training, or "argmax", which is 1 from a logit of 0 on,
            and carries no gradient.

    >>> layer = Gate(eval="argmax").eval()
    >>> layer(torch.tensor([-0.1, 0.0, 0.7]))
    tensor([0., 1., 1.])
    """

    @documented
    def forward(
        self, logits: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw one gate per logit.

        Arguments:
            logits: Log-odds, of any shape.
            mask: Booleans that broadcast against the logits; gates where it is False are 0.

        Returns:
            A tensor of the shape and dtype of `logits`, of zeros and ones unless the estimator is soft.
        """
        if not self._takes_mode:
            return self.estimator.gate(logits, mask=mask, generator=generator)
        with torch.no_grad():
            return _MODE.gate(logits, mask=mask, generator=generator)


class Mask(torch.nn.Module):
    """Module that learns which n of each m entries of a weight to keep.

    It holds a logit for each entry, zeros at first. While training, a call draws a mask that carries the
    gradient; in eval mode it returns the most probable one, without a gradient. To begin with the largest
    weights, write their magnitudes into `logits`.

    Arguments:
        shape: The shape of the weight, whose last axis is a multiple of `m`; a number is that of a vector.
        n: How many entries of each group are kept.
        m: The size of a group of consecutive entries.
        tau: Temperature of the gradient; it may be set while training, but it is not learned.
        hard: True for masks of zeros and ones, False for the surrogate.
        estimator: "simple", "gst:gap=1" or a `gapped.GST` object, as for `gapped.subset`; None is
            "simple".

    >>> mask = Mask((2, 8), n=2, m=4)
    >>> mask.tau = 0.5
    >>> (torch.ones(2, 8) * mask()).sum()
    tensor(8., grad_fn=<SumBackward0>)
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        n: int,
        m: int,
        tau: float | Tensor = 1.0,
        hard: bool = True,
        *,
        estimator: str | GST | StraightThrough | None = None,
    ) -> None:
        super().__init__()
        # The gradient has no derivative by its temperature: a Parameter would be stored, and refused later.
        check_level("tau", tau, positive=True)
        shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not shape:
            raise reject("shape", shape, "the shape of a weight, with at least one axis")
        n, m = check_groups(shape[-1], n, m, "shape")
        self.logits = torch.nn.Parameter(torch.zeros(*shape))
        self.n, self.m, self.tau, self.hard, self.estimator = n, m, tau, hard, estimator

    @documented
    def forward(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw a mask of the module's `shape`; in eval mode, return the most probable one.

        Returns:
            The mask. It carries a gradient to the module's `logits`, except in eval mode.
        """
        if self.training:
            return nm_mask(
                self.logits,
                self.n,
                self.m,
                self.tau,
                self.hard,
                estimator=self.estimator,
                generator=generator,
            )
        # Relative to the largest: a group without a law is NaN as a whole.
        groups = simplex.shift(simplex.computed(torch.unflatten(self.logits.detach(), -1, (-1, self.m))))
        best = torch.zeros_like(groups).scatter(-1, groups.topk(self.n).indices, 1.0)
        best = best.masked_fill(groups == -torch.inf, 0.0)
        return best.masked_fill(groups.isnan(), torch.nan).flatten(-2).to(self.logits.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.logits.shape)}, n={self.n}, m={self.m}, tau={self.tau}, hard={self.hard}"
