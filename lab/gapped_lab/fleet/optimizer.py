"""Over stacked weights, run by run: Adam and clipping, the best weights, rates on a plateau, norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gapped_lab.fleet.estimator_groups import Grouped

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_NORM_EPS = 1e-6
# Of the average behind the second moment, from which on RAdam divides by it.
_LEAST_LENGTH = 5
# By which learning rates fall, and by how much of itself a score must grow to count as progress.
_FACTOR, _THRESHOLD = 0.5, 1e-4


@dataclass(frozen=True)
class Adaptation:
    """Which of Adam's relatives a task is trained with."""

    rectified: bool = False
    """Whether it is RAdam, whose step grows with what the second moment is known by."""
    weight_decay: float = 0.0
    """The decay of AdamW, in units of the learning rate."""


class Adam:
    """The update of `torch.optim.Adam`, for parameters whose first axis is the run axis.

    The step count and the learning rates are tensors on the parameters' device, so that a captured graph
    reads their present values.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        learning_rate: Tensor,
        rule: Adaptation = Adaptation(),
        *,
        compiled: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.learning_rate, self.rule = learning_rate, rule
        self.count = torch.zeros((), dtype=torch.float64, device=learning_rate.device)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        # Compiled, each weight is read and written once per step instead of a dozen times. The step sizes,
        # which all weights share, are compiled separately, so that they are computed once.
        self._sizes = torch.compile(step_sizes, dynamic=False) if compiled else step_sizes
        self._update = torch.compile(update, dynamic=False) if compiled else update

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], alive: Tensor, scales: Tensor | None = None) -> None:
        """One update of the runs that are `alive`, a boolean per run, by gradients times `scales`, if any."""
        self.count += 1
        sizes = self._sizes(self.learning_rate, self.count, self.rule.rectified)
        decay = self.learning_rate * self.rule.weight_decay if self.rule.weight_decay else None
        self._update(self.parameters, gradients, scales, self.first, self.second, *sizes, decay, alive)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "first": self.first, "second": self.second}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count.copy_(state["count"])  # type: ignore[arg-type]
        for name in ("first", "second"):
            for mine, theirs in zip(getattr(self, name), state[name], strict=True):  # type: ignore[call-overload]
                mine.copy_(theirs)


def step_sizes(learning_rate: Tensor, count: Tensor, rectified: bool) -> tuple[Tensor, Tensor, Tensor]:
    r"""The parts of a step: m times the first, over :math:`\sqrt v` over the second plus the third.

    For Adam the learning rates over the first moment's bias correction, the square root of the second's, and
    a small constant. For RAdam the first has the rectification as a factor; as long as the second moment
    does not have a finite variance, in the first five steps, the step is m alone.
    """
    size, root = learning_rate / (1 - _BETAS[0] ** count), (1 - _BETAS[1] ** count).sqrt()
    if not rectified:
        return size, root, torch.full_like(root, _EPS)
    longest = 2 / (1 - _BETAS[1]) - 1
    length = longest - 2 * count * _BETAS[1] ** count / (1 - _BETAS[1] ** count)
    known = length > _LEAST_LENGTH
    shrunk = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    size = torch.where(known, size * shrunk.clamp(min=0.0).sqrt(), size)
    return size, torch.where(known, root, torch.inf), torch.where(known, _EPS / root, 1.0)


def update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Tensor | None,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    size: Tensor,
    root: Tensor,
    least: Tensor,
    decay: Tensor | None,
    alive: Tensor,
) -> None:
    """One update in place; `size`, `root` and `least` are `step_sizes`, `decay` what weights lose of them."""
    for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
        g = scale(gradient, scales)
        shape = (-1,) + (1,) * (p.dim() - 1)
        m.lerp_(g, 1 - _BETAS[0])
        v.mul_(_BETAS[1]).addcmul_(g, g, value=1 - _BETAS[1])
        change = size.to(p.dtype).view(shape) * m / (v.sqrt() / root.to(p.dtype) + least.to(p.dtype))
        if decay is not None:
            change = change + decay.to(p.dtype).view(shape) * p
        # Selected, not multiplied by zero: a frozen run's moments may be NaN, its weights must not become so.
        p.sub_(torch.where(alive.view(shape), change, 0.0))


@torch.no_grad()
def clip_scales(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """The factor of each run's gradients for a norm of at most `limit` over all weights, ``(R,)``.

    The rule of `torch.nn.utils.clip_grad_norm_`, for gradients whose first axis is the run axis. The products
    are left to `update`, which reads the gradients anyway: as tensors of their own, all weights would go
    through memory twice more.
    """
    each = torch.stack([vector_norm(gradient.flatten(1), dim=1) for gradient in gradients], 1)
    norms: Tensor = vector_norm(each, dim=1)
    return (limit / (norms + _NORM_EPS)).clamp(max=1.0)


def scale(gradient: Tensor, scales: Tensor | None) -> Tensor:
    """A gradient times the runs' `scales`, if there are any."""
    # Not in place: autograd may give two weights one and the same tensor.
    return gradient if scales is None else gradient * scales.view(-1, *(1,) * (gradient.dim() - 1))


@dataclass(frozen=True)
class SelectionRule:
    """How a task's runs are validated while they train."""

    metric: str
    """The name of the score in records; more is better."""
    score: Callable[[Grouped], Tensor]
    """Takes the score of each run, ``(R,)``, given their sampler; NaN for a run that is broken."""
    validations: int
    """How often per epoch, evenly spaced, the last time at its end."""
    patience: int
    """The most validations in a row without progress before the learning rate is halved."""

    def due(self, step: int, steps: int) -> bool:
        """Whether a validation follows step number `step`, counted from 0, of `steps`."""
        return (step + 1) * self.validations // steps > step * self.validations // steps


class Selection:
    """The state of validation: the best score and weights of each run, and its learning-rate factor.

    Progress is what `torch.optim.lr_scheduler.ReduceLROnPlateau` takes it to be: a score above the best
    one by more than its ten-thousandth part. The best weights are those of the highest score, the first
    of equals.
    """

    def __init__(self, rule: SelectionRule, parameters: Sequence[Tensor]) -> None:
        self.rule, self.parameters = rule, list(parameters)
        runs, device = len(self.parameters[0]), self.parameters[0].device
        self.last = torch.full((runs,), torch.nan, dtype=torch.float64, device=device)
        self.best = torch.full_like(self.last, -torch.inf)
        self.mark = self.best.clone()
        self.bad = torch.zeros(runs, dtype=torch.int64, device=device)
        self.factor = torch.ones_like(self.last)
        self.weights = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """Update the state with the scores of a validation, ``(R,)``."""
        self.last.copy_(scores)
        better = self.last > self.best
        self.best.copy_(torch.where(better, self.last, self.best))
        for best, p in zip(self.weights, self.parameters, strict=True):
            best.copy_(torch.where(better.view(-1, *(1,) * (p.dim() - 1)), p, best))
        progress = self.last > self.mark * (1 + _THRESHOLD)
        self.mark.copy_(torch.where(progress, self.last, self.mark))
        self.bad.copy_(torch.where(progress, 0, self.bad + 1))
        stuck = self.bad > self.rule.patience
        self.factor.mul_(torch.where(stuck, _FACTOR, 1.0))
        self.bad.masked_fill_(stuck, 0)

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """A context in which the model has the best weights instead of the present ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, object]:
        names = ("last", "best", "mark", "bad", "factor")
        return {**{name: getattr(self, name) for name in names}, "weights": self.weights}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        for name in ("last", "best", "mark", "bad", "factor"):
            getattr(self, name).copy_(state[name])
        for mine, theirs in zip(self.weights, state["weights"], strict=True):  # type: ignore[call-overload]
            mine.copy_(theirs)

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: a captured graph holds the addresses of the weights.
        for best, p in zip(self.weights, self.parameters, strict=True):
            present = p.clone()
            p.copy_(best)
            best.copy_(present)


class GradientNorms:
    """Sums over the steps of an epoch, run by run: of a gradient's norm, and of how often it is exactly zero.

    They are tensors on the weights' device, and nothing is read back before the epoch ends: a captured step
    adds to them.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        def zeros(weight: Tensor) -> Tensor:
            return torch.zeros(len(weight), dtype=torch.float64, device=weight.device)

        self.norms = {name: zeros(weight) for name, weight in weights.items()}
        self.zeros = {name: zeros(weight) for name, weight in weights.items()}

    def clear(self) -> None:
        for total in self.state():
            total.zero_()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a step's gradient, whose first axis is the run axis."""
        # In float64, where no square of a float32 number is lost: the norm is zero if every entry is.
        norm = vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
        self.norms[name] += norm
        self.zeros[name] += norm == 0

    def means(self, steps: int) -> dict[str, Tensor]:
        """For each weight its mean norm, and the share of steps at which it is zero, ``(R,)`` each."""
        means = {f"{name}_gradient_norm": total / steps for name, total in self.norms.items()}
        return means | {f"{name}_gradient_zero": total / steps for name, total in self.zeros.items()}

    def state(self) -> list[Tensor]:
        return [*self.norms.values(), *self.zeros.values()]
