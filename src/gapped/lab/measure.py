"""Measurements on a trainer beyond its losses."""

from __future__ import annotations

import math

import torch

from gapped.errors import GappedError
from gapped.lab.fleet.trainer import Trainer, derived_seed, matmul_precision
from gapped.lab.spec import RunSpec


def variance(trainer: Trainer, spec: RunSpec) -> list[float]:
    trainer.generator.manual_seed(derived_seed(trainer.seed, "variance", trainer.epoch))
    with matmul_precision(trainer.device):
        measured = trainer.task.gradient_variance(
            trainer.sampler, trainer.generator, spec.variance_samples, spec.variance_images
        )
    values: list[float] = measured.tolist()
    return values


def entropy(trainer: Trainer, steps: int) -> list[float]:
    """Mean entropy of the surrogates over the first steps of training."""
    if steps > trainer.task.steps:
        raise GappedError(f"entropy_steps: got {steps}, expected at most {trainer.task.steps}, one epoch")
    soft, noise = trainer.sampler.soft(), torch.Generator(trainer.device)
    noise.manual_seed(derived_seed(trainer.seed, "entropy"))
    total = torch.zeros(len(trainer.runs), dtype=torch.float64, device=trainer.device)

    def look() -> None:
        total.add_(trainer.task.surrogate_entropy(soft, noise))

    with matmul_precision(trainer.device):
        trainer.train_steps(steps, look)
    values: list[float] = (total / steps).tolist()
    return values


def alone(trainer: Trainer, device: torch.device) -> dict[str, list[float]]:
    """What can only be said of a run that had the device to itself."""
    # The first epoch pays for compiling and recording.
    typical = sorted(trainer.seconds[1:] or trainer.seconds or [math.nan])
    found = {"seconds_per_epoch": [typical[len(typical) // 2]]}
    if device.type == "cuda":
        found["gpu_memory_gb"] = [torch.cuda.max_memory_allocated(device) / 1e9]
    return found
