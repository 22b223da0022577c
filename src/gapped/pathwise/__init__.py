"""Estimators whose sample carries the gradient, one file each; here is the base class that they share.

An estimator is a frozen dataclass with two methods, of which only the second must be written. `draw`
generates everything random: by default, one category per row from one uniform per row. `points` is a pure
function of that draw, and returns the points of the simplex that carry the gradient. Both get logits in
float32 or float64, without a graph, with the categories on the last axis and relative to the largest of their
row, which is 0. `Pathwise.sample` does the rest: masks, axes, dtypes, rows without a distribution, blocks of
rows, straight-through glue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from gapped import linear_choices, simplex
from gapped.checks import (
    ROWS,
    check_fit,
    check_flag,
    check_generator,
    check_level,
    check_logits,
    check_mask,
    is_known_finite,
)
from gapped.choice import Choice, fused_choice, plain_choice
from gapped.errors import reject
from gapped.gradient import Points, blocks, is_differentiated, needs_blocks, with_points
from gapped.kernels.sampling import launch
from gapped.linear_choices import LinearChoice


class Draw(NamedTuple):
    """Everything random about a sample."""

    category: Tensor
    """The category of each row, ``(*rows)``."""
    noise: Tensor | None = None
    """Further noise of the surrogate, in the estimator's own form."""


class Outcome(NamedTuple):
    """A sample of ``(*rows, K)`` logits that does not carry its gradient yet."""

    value: Tensor
    """The sample, in the dtype of the logits; empty unless requested."""
    category: Tensor
    """The category of each row: `K` if it has no category, `K + 1` if it holds a NaN or +inf."""
    gradient: Points | None
    """The points that carry the gradient, if one is wanted."""


@dataclass(frozen=True, eq=False)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient."""

    name: ClassVar[str]
    """What the registry, the command line and records call it."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be tensors, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""
    is_consistent: ClassVar[bool] = True
    """Whether the surrogate is largest at the drawn category (property 1 of the paper), by default."""
    learns_tau: ClassVar[bool] = False
    """Whether a temperature that requires a gradient gets one."""

    tau: float | Tensor = 1.0
    """Temperature of the surrogate: a positive number, or a tensor that broadcasts against the logits'
    shape without the category axis. A tensor with as many axes as the logits has that axis too, of size 1."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""
    backend: str = field(default="auto", kw_only=True, repr=False)
    """Who computes: ``"torch"``, ``"triton"`` (or an error where it cannot), or ``"auto"``, which is Triton
    on CUDA where it can and torch elsewhere."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True, learned=self.learns_tau)
        check_flag("hard", self.hard)
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")
        if self.backend not in launch.BACKENDS:
            raise reject("backend", self.backend, f"one of {', '.join(launch.BACKENDS)}")

    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        `dim` is the category axis. Categories where the boolean `mask` is False do not exist; where `dim` is
        not the last axis, the mask needs all axes of the logits. Half precision is computed in float32 and
        rounded once, at the end. The generator's state after the call does not depend on whether a gradient
        is wanted. In a compiled graph `generator` must be None: torch.compile supports only the default one.

        The sample may be changed in place, and so may the logits after it is drawn, except where a kernel
        draws it: kernels keep the logits and the temperatures for the backward pass, and autograd notices.
        """
        rows, is_last = self._masked(logits, dim, mask, generator), dim in (-1, logits.dim() - 1)
        if not is_last:
            rows = rows.movedim(dim, -1).contiguous()
        fitted = self._fitted(logits, dim)
        kernel = fitted._backend_for(rows)
        if kernel is not None:
            value = launch.sample(rows, kernel, generator)
        else:
            wants_gradient = is_differentiated(rows) or fitted.has_learned_tau()
            value = fitted.attach(rows, fitted.outcome(rows.detach(), generator, wants_gradient))
        return value if is_last else value.movedim(-1, dim)

    def __call__(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`sample`."""
        return self.sample(logits, dim=dim, mask=mask, generator=generator)

    def choose(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Draw one category per row without ever writing its one-hot vector: see `Choice`."""
        self.check_choice()
        rows, fitted = self._masked(logits, dim, mask, generator).movedim(dim, -1), self._fitted(logits, dim)
        kernel = fitted._backend_for(rows)
        wants_gradient = is_differentiated(rows)
        rows = rows if wants_gradient else rows.detach()
        if kernel is not None:
            return fused_choice(rows, kernel, launch.draw_key(rows, generator))
        _, index, gradient = fitted.outcome(rows.detach(), generator, wants_gradient, dense=False)
        return plain_choice(rows, index, gradient)

    def choose_linear(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LinearChoice:
        """`choose` for the logits ``hidden @ weight.T + bias``, never held: see `gapped.linear_choice`."""
        self.check_choice()
        return linear_choices.choose(self, hidden, weight, bias, mask, generator)

    def check_choice(self) -> None:
        """Raise an error unless the samples can be given by their index."""
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        if self.has_learned_tau():
            raise reject("tau", "a tensor that requires grad", "one without: a choice has no path to it")

    def _masked(
        self, logits: Tensor, dim: int, mask: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The logits, masked, once all arguments are checked."""
        check_logits(logits, dim)
        check_mask(mask, logits, dim)
        check_generator(generator, logits)
        return simplex.masked(logits, mask)

    def _fitted(self, logits: Tensor, dim: int) -> Self:
        """This estimator with levels that have as many axes as the logits, `dim` of size 1, without `dim`."""
        levels: dict[str, Any] = {
            name: level.squeeze(dim)
            for name in self.levels
            if isinstance(level := getattr(self, name), Tensor)
            and level.dim() == logits.dim()
            and level.shape[dim] == 1
        }
        return replace(self, **levels) if levels else self

    def _backend_for(self, rows: Tensor) -> launch.Fused | None:
        """The kernel that computes, or None for torch, once options given as tensors are known to fit."""
        for name in self.levels:
            check_fit(name, getattr(self, name), rows.shape[:-1], ROWS)
        kernel = self.kernel(rows)
        launch.note_backend("torch" if kernel is None else "triton")
        return kernel

    def outcome(
        self, rows: Tensor, generator: torch.Generator | None, wants_gradient: bool, *, dense: bool = True
    ) -> Outcome:
        """A sample of these rows; its index alone unless `dense`. Large inputs are computed in blocks."""
        if not (needs_blocks(rows) and self.is_divisible()):
            return self._block(rows, generator, wants_gradient, dense)
        shape, categories = rows.shape, rows.shape[-1]
        options = {name: getattr(self, name) for name in self.levels}
        levels: dict[str, Any] = {
            name: level.expand(shape[:-1]).reshape(-1)
            for name, level in options.items()
            if isinstance(level, Tensor)
        }
        value = torch.empty(shape if dense else 0, dtype=rows.dtype, device=rows.device)
        index = torch.empty(shape[:-1], dtype=torch.int64, device=rows.device)
        points: Tensor | None = None
        weights: list[Any] = []
        matrix, values, indices = rows.reshape(-1, categories), value.view(-1, categories), index.view(-1)
        for block in blocks(len(matrix), categories):
            estimator = replace(self, **{name: level[block] for name, level in levels.items()})
            own, indices[block], gradient = estimator._block(matrix[block], generator, wants_gradient, dense)
            if dense:
                values[block] = own
            if gradient is not None:
                if points is None:
                    points = gradient.points.new_empty((len(gradient.points), *matrix.shape))
                points[:, block] = gradient.points
                weights.append(gradient.weights)
        if points is None:
            return Outcome(value, index, None)
        every = torch.cat(weights).view(*shape[:-1], 1) if isinstance(weights[0], Tensor) else weights[0]
        return Outcome(value, index, Points(points.view(-1, *shape), every))

    def _block(
        self, rows: Tensor, generator: torch.Generator | None, wants_gradient: bool, dense: bool
    ) -> Outcome:
        """A sample of these rows, all at once."""
        categories, logits = rows.shape[-1], simplex.computed(rows)
        top = logits.amax(-1, keepdim=True)
        logits = logits - top
        # Rows without categories, and those with a NaN or +inf, have no distribution. Where there may be
        # some, uniform rows replace them, so that estimators need not handle them.
        lawful = None if is_known_finite(top) else top.isfinite()
        if lawful is not None:
            logits = torch.where(lawful, logits, 0.0)
        draw = self.draw(logits, generator, wants_gradient or not self.hard)
        index = draw.category
        if lawful is not None:
            outside = torch.where(top == -torch.inf, categories, categories + 1)
            index = torch.where(lawful, index.unsqueeze(-1), outside).squeeze(-1)
        gradient = None
        if wants_gradient or not self.hard:
            gradient = self.points(logits, draw)
            if lawful is not None:
                filling = torch.where(top == -torch.inf, 0.0, torch.nan)
                gradient = gradient._replace(points=torch.where(lawful, gradient.points, filling))
        if not self.hard:
            assert gradient is not None
            value = gradient.points.mean(0).to(rows.dtype)
        elif not dense:
            value = rows.new_empty(0)
        elif lawful is None:
            value = simplex.lawful_one_hot(index, rows)
        else:
            value = simplex.one_hot(index, categories, rows.dtype)
        return Outcome(value, index, gradient if wants_gradient else None)

    def kernel(self, rows: Tensor) -> launch.Fused | None:
        """The arguments of the fused kernels if they compute these rows, else None."""
        if self.backend == "torch" or (self.backend == "auto" and not rows.is_cuda):
            return None
        fused = self.fused() if torch.compiler.is_compiling() else self._fused
        why_not = launch.refusal(rows, fused)
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"torch or auto here: {why_not}")
        return fused if why_not is None else None

    def fused(self) -> launch.Fused | None:
        """The arguments of the fused kernels for this estimator; None if it has no kernel."""
        return None

    @cached_property
    def _fused(self) -> launch.Fused | None:
        return self.fused()

    def draw(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        """Draw a category per row, and, if `surrogate`, the noise that only the surrogate needs."""
        return Draw(simplex.inverse_cdf(logits.exp(), generator))

    def law(self, logits: Tensor) -> tuple[Tensor, float | Tensor]:
        """The logits of the law that categories are drawn from, and their slope in the given ones."""
        return logits, 1.0

    @abstractmethod
    def points(self, logits: Tensor, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def has_learned_tau(self) -> bool:
        """Whether the temperature wants a gradient."""
        return isinstance(self.tau, Tensor) and self.tau.requires_grad and torch.is_grad_enabled()

    def attach(self, rows: Tensor, outcome: Outcome) -> Tensor:
        """The sample `outcome` of `rows`, with its gradient if there is one."""
        value, index, gradient = outcome
        return value if gradient is None else with_points(value, self.carrier(rows, index), *gradient)

    def carrier(self, rows: Tensor, index: Tensor) -> Tensor:
        """The tensor that receives the gradient: the logits, in the graph, unless overridden."""
        return rows

    def is_divisible(self) -> bool:
        """Whether a block of rows may be computed without the others."""
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        options = (getattr(self, f.name) for f in fields(self))
        return hash((type(self), *(o.shape if isinstance(o, Tensor) else o for o in options)))


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b)


_P = TypeVar("_P", bound=Pathwise)
_PLAIN = frozenset({bool, int, float, str})


def cached_estimator(kind: type[_P], **options: Any) -> _P:
    """The estimator with these options; if all are plain values, it is built and checked only once."""
    # A compiler would have to trace the cache, and gains nothing from it.
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, options.values())):
        return kind(**options)
    return _cache(kind, **options)  # type: ignore[return-value]


@lru_cache(maxsize=256, typed=True)
def _cache(kind: type[Pathwise], **options: Any) -> Pathwise:
    return kind(**options)


def divide(logits: Tensor, tau: float | Tensor) -> Tensor:
    """`logits` over a temperature that `per_row` returned; a no-op for 1."""
    return logits / tau if isinstance(tau, Tensor) or tau != 1 else logits


def per_row(level: float | Tensor, like: Tensor) -> float | Tensor:
    """A temperature or gap in a form that broadcasts against ``(*rows, K)``.

    A negative entry, which only a tensor on a device can still hold, becomes NaN and so does its row.
    """
    if not isinstance(level, Tensor):
        return float(level)
    level = level.detach().to(device=like.device, dtype=like.dtype).unsqueeze(-1)
    return torch.where(level >= 0, level, torch.nan)
