"""Many runs of one task as one program: every weight has a leading *run* axis. Here is the training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gapped.comparison.records import derived_hash
from gapped.diagnostics.gradients import synchronize
from gapped.errors import GappedError
from gapped.registry import Estimator, estimator
from gapped_lab.fleet.capture import Captured
from gapped_lab.fleet.estimator_groups import Grouped, Widths
from gapped_lab.fleet.optimizer import (
    Adam,
    Adaptation,
    GradientNorms,
    Selection,
    SelectionRule,
    clip_scales,
    scale,
)
from gapped_lab.fleet.schedule import LEVELS, Constant, Schedule

RateDecay = Literal["none", "cosine", "warm-cosine"]
"""How the learning rate changes, epoch by epoch: not at all, to zero along a half cosine, or that after it
has risen evenly for a fiftieth of the epochs."""
_WARM = 0.02


class Task(Protocol):
    """A model with a run axis, its batches, loss and metrics, and the measurements that it offers.

    A task inherits from this class. Whatever has a default here may be left out.
    """

    model: torch.nn.Module
    """The weights of all runs, each with a leading run axis."""
    steps: int
    """Steps per epoch."""
    row_axes: int
    """How many axes of the sampled logits lie between run and category."""
    loss_name: str
    """The name of the loss in records, after ``train_``."""
    clip: float | None = None
    """Largest norm of a run's gradient, if there is one."""
    widths: Widths | None = None
    """How many numbers an example has, for estimators with networks of their own; None if it has none."""
    selection: SelectionRule | None = None
    """How runs are validated while they train; then the best weights are tested, at the end. If None, the
    present weights are tested after each epoch."""
    adaptation: Adaptation = Adaptation()
    """Which of Adam's relatives trains the weights."""
    descended: Sequence[tuple[Tensor, float]] = ()
    """The weights trained by plain gradient descent instead of Adam, each with its learning rate."""
    watched: Mapping[str, Tensor] = MappingProxyType({})
    """The weights the norm of whose gradient is recorded, before any clipping, by name."""
    official: bool = True
    """Whether validation and test data are the published ones, and not generated in their place."""

    def start_epoch(self, epoch: int) -> None:
        """Choose the order of the examples for an epoch; a function of the runs' seeds and `epoch` alone."""
        return

    def load_batch(self, step: int) -> None:
        """Put the batch of a step where `loss` finds it."""
        return

    def program(self, step: int) -> Hashable:
        """The key of steps whose losses are recorded as one graph."""
        return None

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """The loss of each run on the loaded batch, ``(R,)``."""

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        """Test metrics of each run, ``(R,)`` each."""

    def gradient_variance(
        self, sampler: Grouped, generator: torch.Generator, samples: int, examples: int
    ) -> Tensor:
        """Mean variance of the weights' gradients over `samples` draws on a fixed batch, ``(R,)``."""
        raise GappedError(f"{type(self).__name__} does not measure the variance of its gradients")

    def surrogate_entropy(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """Mean entropy of the surrogates on the loaded batch, in nats, ``(R,)``; `sampler` is soft."""
        raise GappedError(f"{type(self).__name__} does not measure the entropy of its surrogates")

    def show(
        self, sampler: Grouped, generator: torch.Generator, places: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Examples to look at, as plain values, for each of the runs at `places`; none by default."""
        return iter(())


@dataclass(frozen=True)
class Run:
    """The settings that may differ between the runs of a fleet, apart from their seeds."""

    estimator: Estimator
    learning_rate: float
    schedule: Schedule = Constant()  # noqa: RUF009 - frozen
    decay: RateDecay = "none"

    def rate(self, epoch: int, epochs: int) -> float:
        """The learning rate of an epoch."""
        if self.decay == "none":
            return self.learning_rate
        warm = max(round(_WARM * epochs), 1) if self.decay == "warm-cosine" else 0
        if epoch < warm:
            return self.learning_rate * (epoch + 1) / (warm + 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (epoch - warm) / max(epochs - warm, 1)))


class Trainer:
    """Trains R runs as one program and keeps their history.

    Everything random in an epoch follows from `seed` and the epoch's number; within it, from the state of the
    generator too. So training may stop before any step and go on from a `state_dict` as if it had not. A run
    whose loss is not finite is frozen: its weights stay as they are.
    """

    def __init__(
        self,
        task: Task,
        runs: Sequence[Run],
        epochs: int,
        seed: int,
        device: torch.device,
        *,
        compiled: bool = False,
        test_every: int = 1,
    ) -> None:
        self.task, self.runs, self.epochs, self.seed, self.device = task, list(runs), epochs, seed, device
        self.descended = list(task.descended)
        apart = {id(p) for p, _ in self.descended}
        self.parameters = [p for p in task.model.parameters() if p.requires_grad and id(p) not in apart]
        self._place = {id(p): place for place, p in enumerate(self.parameters)}
        rates = torch.zeros(len(runs), dtype=torch.float64, device=device)
        self.adam = Adam(self.parameters, rates, task.adaptation, compiled=compiled)
        self.sampler = self._sampler([run.estimator for run in runs], compiled)
        self._beside: dict[str, Grouped] = {}
        # Estimators with a state are trained beside the model, each run's share at the run's own rate.
        self.tuned = [
            (part, each, Adam(list(each.parameters()), rates[part.runs], compiled=compiled))
            for part, each in self.sampler.stateful
        ]
        self.base = {name: getattr(self.sampler, name).clone() for name in LEVELS}
        self.generator = torch.Generator(device)
        self.alive = torch.ones(len(runs), dtype=torch.bool, device=device)
        self.loss_sum = torch.zeros(len(runs), dtype=torch.float64, device=device)
        self.norms = GradientNorms(task.watched)
        self.epoch, self.step, self.test_every = 0, 0, test_every
        self.tested: list[int] = []
        self.seconds: list[float] = []
        # When the epoch began, and how long it had lasted where a checkpoint was written within it.
        self._began, self._spent = 0.0, 0.0
        self.history: dict[str, list[list[float]]] = {}
        self.selection = None if task.selection is None else Selection(task.selection, self.parameters)
        self._observe = torch.compile(observe, dynamic=False) if compiled else observe
        self._clip_scales = torch.compile(clip_scales, dynamic=False) if compiled else clip_scales
        self._step = Captured(self._train_step, self.generator, self._state)

    def train_epoch(self, before_step: Callable[[int], None] | None = None) -> None:
        """One pass over the data, or what is left of it.

        Every `test_every` epochs, and after the last one, it ends with the metrics. They are those of the
        test, or the latest validation's where runs are validated while they train. `history` holds the
        losses and metrics of the epochs in `tested`.
        """
        self._began = time.perf_counter() - (self._spent if self.step else 0.0)
        with matmul_precision(self.device):
            self.train_steps(self.task.steps, before_step)
            if (self.epoch + 1) % self.test_every == 0 or self.epoch + 1 == self.epochs:
                self._test()
        self.epoch, self.step = self.epoch + 1, 0
        self.seconds.append(self._seconds_so_far())

    def train_steps(self, steps: int, before_step: Callable[[int], None] | None = None) -> None:
        """The epoch up to its step number `steps`; `before_step` gets each one's number, its batch loaded.

        It may raise, to stop there.
        """
        if self.step == 0:
            self.generator.manual_seed(derived_seed(self.seed, "train", self.epoch))
            self.loss_sum.zero_()
            self.norms.clear()
        self.task.start_epoch(self.epoch)
        self._set_rates()
        scheduled = {name: values for name in LEVELS if (values := self._values_of(name)) is not None}
        for step in range(self.step, steps):
            self.task.load_batch(step)
            for name, values in scheduled.items():
                getattr(self.sampler, name).copy_(values[step])
            if before_step is not None:
                before_step(step)
            self._step(self.task.program(step))
            if self.selection is not None and self.selection.rule.due(step, self.task.steps):
                self.selection.observe(self.selection.rule.score(self.sampler))
                self._set_rates()
            self.step = step + 1

    def _seconds_so_far(self) -> float:
        """The seconds of the epoch so far, those of steps that are queued on the device included."""
        synchronize(self.device)
        return time.perf_counter() - self._began

    def beside(self, text: str) -> Grouped:
        """All runs with another estimator, given as text: to measure it at their weights."""
        if text not in self._beside:
            self._beside[text] = self._sampler([estimator(text) for _ in self.runs])
        return self._beside[text]

    def _sampler(self, estimators: Sequence[Estimator], compiled: bool = False) -> Grouped:
        task, dtype = self.task, next(self.task.model.parameters()).dtype
        return Grouped.of(estimators, task.row_axes, self.device, dtype, task.widths, compiled=compiled)

    def best_weights(self) -> AbstractContextManager[None]:
        """The best weights in the place of the present ones; a no-op where no best ones are kept."""
        return nullcontext() if self.selection is None else self.selection.best_weights()

    def show(self, places: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The task's examples to look at, with the best weights, for each of the runs at `places`."""
        self.generator.manual_seed(derived_seed(self.seed, "pictures"))
        with self.best_weights():
            yield from self.task.show(self.sampler, self.generator, places)

    def test(self) -> dict[str, list[float]]:
        """Metrics that are taken once, after training: those of the best weights, where they are kept."""
        if self.selection is None:
            return {}
        with matmul_precision(self.device), self.best_weights():
            metrics = self.evaluate()
        return {f"best_{self.selection.rule.metric}": self.selection.best.tolist()} | {
            name: values.double().tolist() for name, values in metrics.items()
        }

    def evaluate(self) -> dict[str, Tensor]:
        """Test metrics of hard samples, at each run's own temperature."""
        self.sampler.tau.copy_(self.base["tau"])
        self.generator.manual_seed(derived_seed(self.seed, "test", self.epoch))
        with torch.no_grad():
            return self.task.evaluate(self.sampler.discrete(), self.generator)

    def _test(self) -> None:
        metrics = {f"train_{self.task.loss_name}": self.loss_sum / self.task.steps}
        metrics |= self.norms.means(self.task.steps)
        if self.selection is None:
            metrics |= self.evaluate()
        else:
            metrics |= {self.selection.rule.metric: self.selection.last}
        for name, values in metrics.items():
            # A run may diverge in its last step, which the losses so far do not show.
            self.alive &= values.isfinite()
            self.history.setdefault(name, []).append(values.double().tolist())
        self.tested.append(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training depends on, as plain containers and tensors."""
        return {
            "epoch": self.epoch,
            "within": {
                "step": self.step,
                "seconds": self._seconds_so_far(),
                "noise": self.generator.get_state(),
                "sums": [self.loss_sum, *self.norms.state()],
            },
            "seconds": self.seconds,
            "history": self.history,
            "tested": self.tested,
            "alive": self.alive,
            "model": self.task.model.state_dict(),
            "adam": self.adam.state_dict(),
            "estimators": [each.state_dict() for _, each, _ in self.tuned],
            "tuners": [tuner.state_dict() for _, _, tuner in self.tuned],
            "selection": None if self.selection is None else self.selection.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; a ValueError if that is of a later epoch than the last one here."""
        if not 0 <= state["epoch"] == len(state["seconds"]) <= self.epochs:
            raise ValueError(f"epoch {state['epoch']} of {self.epochs}")
        self.epoch, self.seconds, self.history = state["epoch"], state["seconds"], state["history"]
        self.tested, within = state["tested"], state["within"]
        self.step, self._spent = within["step"], within["seconds"]
        self.generator.set_state(within["noise"].cpu())
        for own, value in zip((self.loss_sum, *self.norms.state()), within["sums"], strict=True):
            own.copy_(value)
        self.alive.copy_(state["alive"])
        self.task.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for (_, each, tuner), own, moments in zip(
            self.tuned, state["estimators"], state["tuners"], strict=True
        ):
            each.load_state_dict(own)
            tuner.load_state_dict(moments)
        if self.selection is not None:
            self.selection.load_state_dict(state["selection"])

    def _train_step(self) -> None:
        loss = self.task.loss(self.sampler, self.generator)
        everything = [*self.parameters, *(p for p, _ in self.descended)]
        gradients = torch.autograd.grad(loss.sum(), everything)
        self._observe(loss.detach(), self.loss_sum, self.alive)
        for name, weight in self.task.watched.items():
            self.norms.add(name, gradients[self._place[id(weight)]])
        scales = None if self.task.clip is None else self._clip_scales(gradients, self.task.clip)
        self.adam.step(gradients[: len(self.parameters)], self.alive, scales)
        for (p, rate), g in zip(self.descended, gradients[len(self.parameters) :], strict=True):
            with torch.no_grad():
                p.sub_(torch.where(self.alive.view(-1, *(1,) * (p.dim() - 1)), rate * scale(g, scales), 0.0))
        for part, each, tuner in self.tuned:
            if tuner.parameters:
                _, slopes = each.take_loss()
                # The estimator's loss is a mean over its runs; each run is to have its own.
                own = [
                    slopes[name] * len(part) if name in slopes else torch.zeros_like(p)
                    for name, p in each.named_parameters()
                ]
                tuner.step(own, self.alive[part.runs])

    def _set_rates(self) -> None:
        rates = [run.rate(self.epoch, self.epochs) for run in self.runs]
        self.adam.learning_rate.copy_(torch.tensor(rates, dtype=torch.float64))
        if self.selection is not None:
            self.adam.learning_rate.mul_(self.selection.factor)

    def _values_of(self, level: str) -> Tensor | None:
        """The values of a level in the epoch, ``(steps, R)``, or None if they never change."""
        base = self.base[level]
        if all(run.schedule.level != level for run in self.runs):
            getattr(self.sampler, level).copy_(base)
            return None
        total, first = self.epochs * self.task.steps, self.epoch * self.task.steps
        still = Constant()
        runs = [
            (run.schedule if run.schedule.level == level else still, own)
            for run, own in zip(self.runs, base.tolist(), strict=True)
        ]
        steps = range(first, first + self.task.steps)
        table = [[schedule.tau(own, step, total) for schedule, own in runs] for step in steps]
        return torch.tensor(table, device=self.device, dtype=base.dtype)

    def _state(self) -> list[Tensor]:
        """All tensors that a training step changes."""
        adams = (self.adam, *(tuner for _, _, tuner in self.tuned))
        weights = [t for adam in adams for t in (*adam.parameters, *adam.first, *adam.second, adam.count)]
        buffers = [t for _, each, _ in self.tuned for t in each.buffers()]
        sums = (self.loss_sum, self.alive, *self.norms.state())
        return [*weights, *buffers, *(p for p, _ in self.descended), *sums]


def observe(loss: Tensor, total: Tensor, alive: Tensor) -> None:
    """Add the runs' losses to their `total`; runs are `alive` as long as these are finite."""
    total += loss
    alive &= loss.isfinite()


def derived_seed(*keys: object) -> int:
    """A seed that is a function of the `keys`."""
    return int(derived_hash(*keys)[:14], 16)


def permutation(count: int, *keys: object) -> Tensor:
    """An order of `count` examples that is a function of the `keys`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derived_seed(*keys)))


@contextmanager
def matmul_precision(device: torch.device) -> Iterator[None]:
    """TF32 products on a GPU while training, and the caller's setting afterwards."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
