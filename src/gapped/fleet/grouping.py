"""One estimator for a whole fleet, made of the estimators of its runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.registry import Pathwise

__all__ = ["Grouped", "group_key", "is_level"]

_LEVELS = ("tau", "gap", "tau_forward")


def group_key(estimator: Pathwise) -> Hashable:
    """What runs must have in common to be sampled by one call: everything but the numeric levels."""
    rest = ((f.name, getattr(estimator, f.name)) for f in fields(estimator))
    return type(estimator), tuple((name, value) for name, value in rest if not is_level(name, value))


@dataclass(frozen=True)
class Grouped:
    """Samples logits ``(R, *rows, K)`` with each run's own estimator.

    Neighbouring runs whose estimators differ only in numbers (`tau`, `gap`, `tau_forward`) are sampled
    together, with those numbers as tensors along the run axis. `tau` can be changed in place between
    steps: it is the tensor, one entry per run, that all groups look at.
    """

    groups: tuple[tuple[int, int, Pathwise], ...]
    tau: Tensor

    @classmethod
    def of(
        cls, estimators: Sequence[Pathwise], rows: int, device: torch.device, dtype: torch.dtype
    ) -> Grouped:
        """Group `estimators`, one per run in order, for logits with `rows` axes between run and category."""
        tau = torch.tensor([float(e.tau) for e in estimators], device=device, dtype=dtype)
        groups, start = [], 0
        for _, members in groupby(estimators, key=group_key):
            same = list(members)
            stop = start + len(same)
            shape = (-1,) + (1,) * rows
            levels: dict[str, Any] = {"tau": tau[start:stop].view(shape)}
            for name in _LEVELS[1:]:
                values = [getattr(e, name, None) for e in same]
                if is_level(name, values[0]):
                    levels[name] = torch.tensor(values, device=device, dtype=dtype).view(shape)
            groups.append((start, stop, replace(same[0], **levels)))
            start = stop
        return cls(tuple(groups), tau)

    def soft(self) -> Grouped:
        """The same, but with the surrogates as samples."""
        return replace(self, groups=tuple((a, b, replace(each, hard=False)) for a, b, each in self.groups))

    @property
    def hard(self) -> bool:
        """Whether the samples of all runs are one-hot."""
        return all(each.hard for _, _, each in self.groups)

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        logits = simplex.masked(logits, mask)
        parts = [each.sample(logits[a:b], generator=generator) for a, b, each in self.groups]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def is_level(name: str, value: object) -> bool:
    """Whether an option is a number that may differ between runs that are sampled together."""
    return name in _LEVELS and isinstance(value, int | float)
