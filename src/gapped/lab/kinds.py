"""Tasks by name: what each accepts, and how a fleet's task is made of its runs' specs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from gapped.lab import data as data_sets
from gapped.lab.data.listops import LISTOPS, ListOpsSource
from gapped.lab.fleet.trainer import Task
from gapped.lab.tasks.listops.protocol import protocol as listops_protocol
from gapped.lab.tasks.listops.task import ListOpsTask
from gapped.lab.tasks.vae.protocol import protocol as vae_protocol
from gapped.lab.tasks.vae.task import VAETask

if TYPE_CHECKING:
    from gapped.lab.spec import RunSpec


class Rules(Protocol):
    """What every named protocol says, whatever its task."""

    @property
    def epochs(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...


class Kind(Protocol):
    """A task that recipes may name."""

    data: tuple[str, ...]
    """The data sets it can be given, the default first."""
    images: bool
    """Whether its data are images: what can be limited in number, held out, and measured on."""
    shown: str
    """The file beside the records with the task's examples to look at, without its ending."""

    def rules(self, name: str) -> Rules:
        """A protocol by name."""

    def variables(self, protocol: str) -> tuple[int, int] | None:
        """How many variables of how many categories an example has; None where they differ in size."""

    def task(
        self, specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, compiled: bool
    ) -> Task:
        """The task of a fleet."""


class _VAE:
    data: tuple[str, ...] = ("mnist", *(name for name in data_sets.IMAGES if name != "mnist"))
    images = True
    shown = "images"
    rules = staticmethod(vae_protocol)

    def variables(self, protocol: str) -> tuple[int, int]:
        rules = vae_protocol(protocol)
        return rules.latents, rules.categories

    def task(
        self, specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, compiled: bool
    ) -> VAETask:
        first = specs[0]
        rules = vae_protocol(first.protocol)
        data = data_sets.load(first.data, data_dir).limited(
            first.train_images or rules.train_images,
            first.test_images,
            validation=first.split == "validation",
        )
        seeds = [spec.seed for spec in specs]
        return VAETask(rules, data, seeds, device, compiled=compiled, split=first.split)


class _ListOps:
    data: tuple[str, ...] = (LISTOPS.name,)
    images = False
    shown = "trees"
    rules = staticmethod(listops_protocol)

    def variables(self, protocol: str) -> None:
        return None

    def task(
        self, specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, compiled: bool
    ) -> ListOpsTask:
        rules = listops_protocol(specs[0].protocol)
        source = ListOpsSource(count=rules.count, max_tokens=rules.max_tokens)
        data = source.load(data_dir, progress=False, download=False)
        if not (data.valid.official and data.test.official):
            warnings.warn(
                "listops: no official validation or test file is there, so generated ones are used; their "
                "numbers are not to be compared with the paper's",
                stacklevel=2,
            )
        return ListOpsTask(rules, data, [spec.seed for spec in specs], device, compiled=compiled)


KINDS: Mapping[str, Kind] = MappingProxyType({"vae": _VAE(), "listops": _ListOps()})
