"""Tasks and data sets by name: what a task accepts, and how a fleet's task is made of its runs' specs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gapped.comparison.records import RunLine
from gapped.errors import reject
from gapped.score.reinforce import RLOO
from gapped_lab import data as data_sets
from gapped_lab.data.sources import Source
from gapped_lab.fleet import Task
from gapped_lab.listops import ListOpsProtocol, listops_protocol
from gapped_lab.listops.source import LISTOPS, ListOpsSource
from gapped_lab.listops.task import ListOpsTask
from gapped_lab.records import Images, Trees
from gapped_lab.tasks import (
    PolynomialProtocol,
    VAEProtocol,
    count_protocol,
    polynomial_protocol,
    vae_protocol,
)
from gapped_lab.tasks.count_vae import CountTask, Fini
from gapped_lab.tasks.polynomial import PolynomialTask
from gapped_lab.tasks.vae import VAETask

if TYPE_CHECKING:
    from gapped_lab.spec import RunSpec


Rules = VAEProtocol | ListOpsProtocol | PolynomialProtocol
"""A named protocol of one of the tasks."""


@dataclass(frozen=True)
class TaskKind:
    """A task that recipes may name."""

    data: tuple[str, ...]
    """The data sets it can be given, the default first."""
    rules: Callable[[str], Rules]
    """A protocol by name."""
    task: Callable[[Sequence[RunSpec], torch.device, Path | None, bool], Task]
    """The task of a fleet, from specs, device, folder of the data, and whether to compile."""
    examples: type[RunLine]
    """The lines that hold its examples to look at."""
    variables: Callable[[str], tuple[int, int]] | None = None
    """How many variables of how many categories an example has under a protocol; None where that varies."""
    unsupported: tuple[str, ...] = ()
    """Fields of a spec that it has no use for: they must keep their defaults."""
    estimators: tuple[str, ...] = ()
    """The only estimators that it can be given; all for categories if empty."""


def _image_task(
    made: type[VAETask],
    rules_of: Callable[[str], VAEProtocol],
    specs: Sequence[RunSpec],
    device: torch.device,
    data_dir: Path | None,
    compiled: bool,
) -> VAETask:
    first = specs[0]
    rules = rules_of(first.protocol)
    data = data_sets.load(first.data, data_dir).limit(
        first.train_images or rules.train_images,
        first.test_images,
        validation=first.split == "validation",
    )
    seeds = [spec.seed for spec in specs]
    return made(rules, data, seeds, device, compiled=compiled, split=first.split)


def _variables(rules_of: Callable[[str], VAEProtocol | PolynomialProtocol], protocol: str) -> tuple[int, int]:
    rules = rules_of(protocol)
    return rules.latents, rules.categories


def _listops_task(
    specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, compiled: bool
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
    return ListOpsTask(rules, data, [spec.seed for spec in specs], device)


def _polynomial_task(
    specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, compiled: bool
) -> PolynomialTask:
    rules = polynomial_protocol(specs[0].protocol)
    return PolynomialTask(rules, [spec.seed for spec in specs], device)


SOURCES: Mapping[str, Source[object]] = {**data_sets.IMAGES, LISTOPS.name: LISTOPS}
"""The data sets of all kinds; `gapped_lab.data.load` serves the images."""


def source(name: str) -> Source[object]:
    """The data set called `name`, of any kind, to be located or fetched."""
    if name not in SOURCES:
        raise reject("data set", name, f"one of {', '.join(SOURCES)}")
    return SOURCES[name]


_IMAGES = ("mnist", *(name for name in data_sets.IMAGES if name != "mnist"))
_NO_IMAGES = ("split", "train_images", "test_images", "variance_samples", "entropy_steps")
TASK_KINDS: Mapping[str, TaskKind] = MappingProxyType(
    {
        "vae": TaskKind(
            data=_IMAGES,
            rules=vae_protocol,
            task=partial(_image_task, VAETask, vae_protocol),
            examples=Images,
            variables=partial(_variables, vae_protocol),
        ),
        "counts": TaskKind(
            data=_IMAGES,
            rules=count_protocol,
            task=partial(_image_task, CountTask, count_protocol),
            examples=Images,
            variables=partial(_variables, count_protocol),
            unsupported=("entropy_steps",),
            estimators=(Fini.name, RLOO.name),
        ),
        "listops": TaskKind(
            data=(LISTOPS.name,),
            rules=listops_protocol,
            task=_listops_task,
            examples=Trees,
            unsupported=_NO_IMAGES,
        ),
        "polynomial": TaskKind(
            data=("none",),
            rules=polynomial_protocol,
            task=_polynomial_task,
            examples=Images,
            variables=partial(_variables, polynomial_protocol),
            unsupported=_NO_IMAGES,
        ),
    }
)
