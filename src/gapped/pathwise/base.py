"""What the pathwise estimators share: one argument check, one way in and out, one backward pass.

An estimator is a frozen dataclass with two methods: `draw` makes everything random, `points` is a pure
function of what was drawn and says which points of the simplex carry the gradient. Both get logits in
float32 or float64, without a graph, with the categories on the last axis and relative to the largest of
their row (`simplex.shift`). `Pathwise.sample` does the rest: masks, axes, dtypes, straight-through glue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import broadcasts, check_flag, check_generator, check_level, check_logits, check_mask
from gapped.errors import reject
from gapped.kernels import launch
from gapped.once import is_differentiated
from gapped.pathwise.carry import carry
from gapped.pathwise.choice import Choice, fused_choice, plain_choice

__all__ = ["Draw", "Pathwise", "Points", "check_fit", "made", "per_row"]


class Draw(NamedTuple):
    """Everything random about a sample."""

    chosen: Tensor
    """The index drawn for each row, ``(*rows)``."""
    noise: Tensor | None = None
    """What else the surrogate depends on, in the estimator's own form."""


class Points(NamedTuple):
    """Where a sample's gradient comes from: see `gapped.pathwise.carry.carry`."""

    points: Tensor
    """Points of the simplex, ``(m, *rows, K)``."""
    weights: float | Tensor
    """Their weights, a number or a tensor that broadcasts against `points`."""


@dataclass(frozen=True)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient."""

    tau: float | Tensor = 1.0
    """Temperature of the surrogate: a positive number, or a tensor that broadcasts against the logits'
    shape without the category axis."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""
    backend: str = field(default="auto", kw_only=True, repr=False)
    """Who computes: ``"torch"``, ``"triton"`` (or an error where it cannot), or ``"auto"``, which is Triton
    on CUDA where it can and torch elsewhere."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True)
        check_flag("hard", self.hard)
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

        `dim` is the category axis. Categories where the boolean `mask` is False do not exist. Half
        precision is computed in float32 and rounded once, at the end. Noise that only the gradient needs
        is not drawn when no gradient is asked for.
        """
        rows = self._checked(logits, dim, mask, generator)
        if dim in (-1, logits.dim() - 1):
            return self._sample_rows(rows, generator)
        return self._sample_rows(rows.movedim(dim, -1), generator).movedim(-1, dim)

    def choose(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Draw one category per row without ever writing its one-hot vector: see `Choice`."""
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        rows = self._checked(logits, dim, mask, generator).movedim(dim, -1)
        self.check_shapes(rows)
        kernel = self.kernel(rows)
        launch.note_backend("torch" if kernel is None else "triton")
        with torch.no_grad():
            if kernel is not None:
                return fused_choice(rows, kernel, launch.draw_key(rows, generator))
            shifted = simplex.shift(simplex.computed(rows))
            drawn = self.draw(shifted, generator, rows.requires_grad)
            return plain_choice(rows, drawn.chosen, lambda: self.points(shifted, drawn))

    def _checked(
        self, logits: Tensor, dim: int, mask: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The logits with what `mask` leaves of them."""
        check_logits(logits, dim)
        check_mask(mask, logits)
        check_generator(generator, logits)
        return simplex.masked(logits, mask)

    def check_shapes(self, rows: Tensor) -> None:
        """Check that options given as tensors fit the logits, even where they are not used."""
        check_fit("tau", self.tau, rows)

    def _sample_rows(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        self.check_shapes(rows)
        kernel = self.kernel(rows)
        launch.note_backend("torch" if kernel is None else "triton")
        if kernel is not None:
            return launch.sample(rows, kernel, generator)
        return self._sample_computed(simplex.computed(rows), generator).to(rows.dtype)

    def _sample_computed(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        wants_gradient = is_differentiated(rows)
        with torch.no_grad():
            logits = simplex.shift(rows)
            drawn = self.draw(logits, generator, wants_gradient or not self.hard)
            value = simplex.one_hot(drawn.chosen, rows.shape[-1], rows.dtype)
            if self.hard and not wants_gradient:
                return value
            points, weights = self.points(logits, drawn)
            if not self.hard:
                exists = (drawn.chosen < rows.shape[-1]).unsqueeze(-1)
                value = torch.where(exists, points.mean(0), value)
        return carry(value, self.carrier(rows, drawn), points, weights)

    def kernel(self, rows: Tensor) -> launch.Fused | None:
        """What the kernels are told if they are to compute, or None."""
        if self.backend == "torch" or (self.backend == "auto" and not rows.is_cuda):
            return None
        fused = self.fused() if torch.compiler.is_compiling() else self._fused
        why_not = launch.refusal(rows, fused)
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"torch or auto here: {why_not}")
        return fused if why_not is None else None

    def fused(self) -> launch.Fused | None:
        """What the fused kernels need to take this estimator's place; None if they cannot."""
        return None

    @cached_property
    def _fused(self) -> launch.Fused | None:
        return self.fused()

    @abstractmethod
    def draw(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        """Draw from the law of `logits`; noise for the surrogate alone is needed only if `surrogate`."""

    @abstractmethod
    def points(self, logits: Tensor, drawn: Draw) -> Points:
        """The points and weights that belong to `drawn`."""

    def carrier(self, rows: Tensor, drawn: Draw) -> Tensor:
        """What receives the gradient: the logits themselves, in the graph, unless overridden."""
        return rows


_P = TypeVar("_P", bound=Pathwise)
_PLAIN = frozenset({bool, int, float, str})


def made(kind: type[_P], **options: Any) -> _P:
    """The estimator with these options. Where all of them are plain it is made, and checked, only once."""
    # A compiler would have to follow what is kept, and has no use for it.
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, options.values())):
        return kind(**options)
    return _kept(kind, **options)  # type: ignore[return-value]


@lru_cache(maxsize=256, typed=True)
def _kept(kind: type[Pathwise], **options: Any) -> Pathwise:
    return kind(**options)


def check_fit(name: str, level: float | Tensor, like: Tensor) -> None:
    """Check that a temperature or gap has one value for each row of the logits, or for several."""
    if not isinstance(level, Tensor):
        return
    rows = tuple(like.shape[:-1])
    if not broadcasts(tuple(level.shape), rows):
        accepted = f"a shape that broadcasts against {rows}, the logits' without their category axis"
        raise reject(name, f"a tensor of shape {tuple(level.shape)}", accepted)


def per_row(name: str, level: float | Tensor, like: Tensor) -> float | Tensor:
    """A temperature or gap in a form that broadcasts against ``(*rows, K)``.

    A negative entry, which only a tensor on a device can still hold, becomes NaN and so does its row.
    """
    check_fit(name, level, like)
    if not isinstance(level, Tensor):
        return float(level)
    level = level.to(device=like.device, dtype=like.dtype).unsqueeze(-1)
    return torch.where(level >= 0, level, torch.nan)
