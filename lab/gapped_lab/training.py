"""Training a fleet, from its checkpoint if there is one: the step that all engines share."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from gapped.comparison.records import RunLine
from gapped.errors import GappedError, MissingExtra
from gapped_lab.fleet import Run, Trainer, derived_seed, matmul_precision
from gapped_lab.planning import Fleet
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.results import failure_records, result_lines
from gapped_lab.spec import RunSpec
from gapped_lab.store import Store
from gapped_lab.task_kinds import source


class Interrupted(Exception):
    """Stopped on request, after a checkpoint if one could be written."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a command trains, beside its recipes and its engine."""

    data_dir: Path | None = None
    """Where data sets are looked up first."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    checkpoint_seconds: float = 180.0
    """Seconds between checkpoints, which are written at the end of an epoch, and where training stops."""


def check_data(fleets: Iterable[Fleet], data_dir: Path | None) -> None:
    """Refuse, before the first fleet trains, what a later one would lack a package for."""
    for name in dict.fromkeys(fleet.specs[0].data for fleet in fleets):
        if name != "none":
            source(name).check(data_dir)


def attempt(
    fleet: Fleet, device: torch.device, checkpoints: Store | None, settings: Settings
) -> Sequence[RunLine]:
    """`train` a fleet; if that fails, records that say so. A package that is missing ends the command."""
    began = time.monotonic()
    try:
        return train(fleet, device, checkpoints, settings)
    except (Interrupted, MissingExtra):
        raise
    except Exception as problem:
        return failure_records(fleet, problem, time.monotonic() - began, device)


def train(fleet: Fleet, device: torch.device, checkpoints: Store | None, settings: Settings) -> list[RunLine]:
    """Train a fleet from its checkpoint, or from the beginning, and return its lines."""
    spec = fleet.specs[0]
    if device.type == "cuda":
        # The memory of an earlier fleet must neither be kept nor counted; compiled code holds its model.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = _restore(fleet, device, checkpoints, settings.data_dir)
    metrics: dict[str, list[float]] = {}
    if spec.entropy_steps:
        metrics["surrogate_entropy"] = _surrogate_entropy(trainer, spec.entropy_steps)
    else:
        _train_epochs(fleet, trainer, checkpoints, settings)
    if spec.variance_samples and not spec.variance_every_epoch:
        metrics |= _gradient_variances(trainer, spec)
    if len(fleet.specs) == 1:
        metrics |= _costs(trainer, device)
    return result_lines(fleet, trainer, metrics | trainer.test(), device)


def build(specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, key: str) -> Trainer:
    """The trainer of a fleet, before its first step."""
    first = specs[0]
    rules = first.kind.rules(first.protocol)
    compiled = device.type == "cuda"
    runs = [
        Run(
            spec.make_estimator(),
            spec.learning_rate or rules.learning_rate,
            spec.make_schedule(),
            decay=spec.rate_decay,
        )
        for spec in specs
    ]
    return Trainer(
        first.kind.task(specs, device, data_dir, compiled),
        runs,
        first.epochs,
        derived_seed(key),
        device,
        compiled=compiled,
        test_every=first.test_every,
    )


def _restore(fleet: Fleet, device: torch.device, checkpoints: Store | None, data_dir: Path | None) -> Trainer:
    """The fleet's trainer, as its checkpoint left it if there is one that can be used."""
    trainer = build(fleet.specs, device, data_dir, fleet.key)
    state = None if checkpoints is None else checkpoints.load_checkpoint(fleet.key, device)
    if checkpoints is not None and state is not None:
        try:
            trainer.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            checkpoints.pass_over(fleet.key, "not the state of this fleet")
            return build(fleet.specs, device, data_dir, fleet.key)
    return trainer


def _train_epochs(fleet: Fleet, trainer: Trainer, checkpoints: Store | None, settings: Settings) -> None:
    """Train to the last epoch, with measurements, callbacks and checkpoints on the way."""
    spec, callbacks = fleet.specs[0], settings.callbacks
    last_save, first = time.monotonic(), (trainer.epoch, trainer.step)

    def before_step(step: int) -> None:
        callbacks.step(fleet, trainer.epoch + step / trainer.task.steps)
        # After one step at the earliest: so a command that is repeated comes to an end.
        if (trainer.epoch, step) != first and callbacks.wants_stop():
            stop()

    def stop() -> NoReturn:
        if checkpoints is not None:
            _save_checkpoint(fleet, trainer, checkpoints, stops=True)
        raise Interrupted

    while trainer.epoch < spec.epochs:
        trainer.train_epoch(before_step)
        if spec.variance_samples and spec.variance_every_epoch and trainer.tested[-1:] == [trainer.epoch]:
            began = time.perf_counter()
            for name, values in _gradient_variances(trainer, spec).items():
                trainer.history.setdefault(name, []).append(values)
            trainer.seconds[-1] += time.perf_counter() - began
        latest = {name: values[-1] for name, values in trainer.history.items()}
        callbacks.epoch(fleet, Snapshot(trainer.epoch, trainer.epochs, latest, trainer.alive.tolist()))
        if callbacks.wants_stop():
            stop()
        if checkpoints is not None and time.monotonic() - last_save >= settings.checkpoint_seconds:
            _save_checkpoint(fleet, trainer, checkpoints, stops=False)
            last_save = time.monotonic()


def _save_checkpoint(fleet: Fleet, trainer: Trainer, checkpoints: Store, *, stops: bool) -> None:
    """Save the trainer's state; where that cannot be written, a warning says what is kept."""
    try:
        checkpoints.save_checkpoint(fleet.key, trainer.state_dict())
    except OSError as problem:
        remains = "the last one" if checkpoints.has_checkpoint(fleet.key) else "nothing"
        then = f"{remains} is kept of its fleet" if stops else "training goes on"
        reason = f"no checkpoint could be written ({problem.strerror})"
        warnings.warn(f"{problem.filename}: {reason}; {then}", stacklevel=2)


def _gradient_variances(trainer: Trainer, spec: RunSpec) -> dict[str, list[float]]:
    """The variances of the runs' gradients, and of another estimator's, at the same weights, if wanted."""
    samplers = {"gradient_variance": trainer.sampler}
    if spec.variance_beside:
        samplers["gradient_variance_beside"] = trainer.beside(spec.variance_beside)
    variances: dict[str, list[float]] = {}
    for name, sampler in samplers.items():
        trainer.generator.manual_seed(derived_seed(trainer.seed, "variance", trainer.epoch))
        with matmul_precision(trainer.device):
            variances[name] = trainer.task.gradient_variance(
                sampler, trainer.generator, spec.variance_samples, spec.variance_images
            ).tolist()
    return variances


def _surrogate_entropy(trainer: Trainer, steps: int) -> list[float]:
    """Mean entropy of the surrogates over the first steps of training."""
    if steps > trainer.task.steps:
        raise GappedError(f"entropy_steps: got {steps}, expected at most {trainer.task.steps}, one epoch")
    soft, noise = trainer.sampler.soft(), torch.Generator(trainer.device)
    noise.manual_seed(derived_seed(trainer.seed, "entropy"))
    total = torch.zeros(len(trainer.runs), dtype=torch.float64, device=trainer.device)

    def add_batch(step: int) -> None:
        total.add_(trainer.task.surrogate_entropy(soft, noise))

    with matmul_precision(trainer.device):
        trainer.train_steps(steps, add_batch)
    means: list[float] = (total / steps).tolist()
    return means


def _costs(trainer: Trainer, device: torch.device) -> dict[str, list[float]]:
    """Time and memory, which only a run that had the device to itself can claim."""
    # The first epoch pays for compiling and recording.
    typical = sorted(trainer.seconds[1:] or trainer.seconds or [math.nan])
    costs = {"seconds_per_epoch": [typical[len(typical) // 2]]}
    if device.type == "cuda":
        costs["gpu_memory_gb"] = [torch.cuda.max_memory_allocated(device) / 1e9]
    return costs
