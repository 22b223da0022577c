"""What the pathwise estimators share: one argument check, one way in and out, one backward pass.

An estimator is a frozen dataclass with two methods: `draw` makes everything random, `points` is a pure
function of what was drawn and says which points of the simplex carry the gradient. Both get logits in
float32 or float64, without a graph, with the categories on the last axis and relative to the largest of
their row (`simplex.shift`). `Pathwise.sample` does the rest: masks, axes, dtypes, straight-through glue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.pathwise.carry import carry

__all__ = ["Draw", "Pathwise", "Points", "check_level", "per_row"]


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
    """Their weights, a number or broadcastable to ``(m, *rows, 1)``."""


@dataclass(frozen=True)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient."""

    tau: float | Tensor = 1.0
    """Temperature of the surrogate: a positive number, or a tensor that broadcasts against the logits'
    shape without the category axis."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True)
        check_flag("hard", self.hard)

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
        _check_logits(logits, dim)
        rows = _computed(simplex.masked(logits, _checked_mask(mask, logits)))
        if dim in (-1, logits.dim() - 1):
            return self._sample_rows(rows, generator).to(logits.dtype)
        return self._sample_rows(rows.movedim(dim, -1), generator).movedim(-1, dim).to(logits.dtype)

    def _sample_rows(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        wants_gradient = torch.is_grad_enabled() and rows.requires_grad
        with torch.no_grad():
            logits = simplex.shift(rows)
            drawn = self.draw(logits, generator, wants_gradient or not self.hard)
            value = simplex.one_hot(drawn.chosen, rows.shape[-1], rows.dtype)
            if self.hard and not wants_gradient:
                return value
            points, weights = self.points(logits, drawn)
            if not self.hard:
                sound = (drawn.chosen >= 0) & (drawn.chosen < rows.shape[-1])
                value = torch.where(sound.unsqueeze(-1), points.mean(0), value)
        return carry(value, self.carrier(rows, drawn), points, weights)

    @abstractmethod
    def draw(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        """Draw from the law of `logits`; noise for the surrogate alone is needed only if `surrogate`."""

    @abstractmethod
    def points(self, logits: Tensor, drawn: Draw) -> Points:
        """The points and weights that belong to `drawn`."""

    def carrier(self, rows: Tensor, drawn: Draw) -> Tensor:
        """What receives the gradient: the logits themselves, in the graph, unless overridden."""
        return rows


def check_flag(name: str, flag: object) -> None:
    """Check an option that is either on or off."""
    if not isinstance(flag, bool):
        raise reject(name, flag, "True or False")


def check_level(name: str, level: object, *, positive: bool) -> None:
    """Check a temperature or a gap: a finite number, or a floating-point tensor of such numbers.

    Values inside a tensor are looked at on the CPU only: elsewhere that would wait for the device.
    """
    accepted = "a positive number or tensor" if positive else "a non-negative number or tensor"
    if isinstance(level, Tensor):
        if not level.is_floating_point() or level.requires_grad:
            kind = f"a tensor of dtype {level.dtype}" + (" that requires grad" if level.requires_grad else "")
            raise reject(name, kind, f"{accepted}, floating-point and without gradient")
        if level.device.type == "cpu" and not _all_valid(level, positive):
            raise reject(name, "a tensor with values out of range", accepted)
    elif not _is_number(level) or level < 0 or (positive and level == 0):
        raise reject(name, level, accepted)


def per_row(name: str, level: float | Tensor, like: Tensor) -> float | Tensor:
    """A temperature or gap in a form that broadcasts against ``(*rows, K)``.

    A negative entry, which only a tensor on a device can still hold, becomes NaN and so does its row.
    """
    if not isinstance(level, Tensor):
        return float(level)
    rows = tuple(like.shape[:-1])
    if not _broadcasts(tuple(level.shape), rows):
        accepted = f"a shape that broadcasts against {rows}, the logits' without their category axis"
        raise reject(name, f"a tensor of shape {tuple(level.shape)}", accepted)
    level = level.to(device=like.device, dtype=like.dtype).unsqueeze(-1)
    return torch.where(level >= 0, level, torch.nan)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False))


def _is_number(level: object) -> TypeGuard[float]:
    return isinstance(level, int | float) and not isinstance(level, bool) and math.isfinite(level)


def _all_valid(level: Tensor, positive: bool) -> bool:
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(((level > 0) if positive else (level >= 0)).all())
    except RuntimeError:
        # Under vmap a value cannot decide anything.
        return True


def _check_logits(logits: object, dim: object) -> None:
    accepted = "a floating-point tensor of scores, one per category"
    if not isinstance(logits, Tensor):
        raise reject("logits", f"an object of type {type(logits).__name__}", accepted)
    if not logits.is_floating_point():
        raise reject("logits", f"a tensor of dtype {logits.dtype}", accepted)
    if logits.dim() == 0:
        raise reject("logits", "a tensor without any axis", accepted)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -logits.dim() <= dim < logits.dim():
        raise reject("dim", dim, f"an axis of logits of shape {tuple(logits.shape)}")
    if logits.shape[dim] == 0:
        raise reject(
            "logits", f"a tensor of shape {tuple(logits.shape)} with dim={dim}", "at least one category"
        )


def _checked_mask(mask: object, logits: Tensor) -> Tensor | None:
    if mask is None:
        return None
    accepted = f"a boolean tensor that broadcasts to the logits' shape {tuple(logits.shape)}"
    if not isinstance(mask, Tensor):
        raise reject("mask", f"an object of type {type(mask).__name__}", accepted)
    if mask.dtype != torch.bool:
        raise reject("mask", f"a tensor of dtype {mask.dtype}", accepted)
    if not _broadcasts(tuple(mask.shape), tuple(logits.shape)):
        raise reject("mask", f"a tensor of shape {tuple(mask.shape)}", accepted)
    return mask


def _computed(logits: Tensor) -> Tensor:
    """Logits in the dtype that the arithmetic is done in."""
    return logits if logits.dtype == torch.float64 else logits.float()
