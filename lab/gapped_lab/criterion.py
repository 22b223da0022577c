r"""Do measured gradients predict how well an estimator trains? Measurements beside the trained results.

All estimators are measured at the same weights: those of a run that another estimator trains, at its start
and at a few epochs. There, on one batch, with :math:`g` a gradient, :math:`\mu` and :math:`V` its mean and
its total variance, and :math:`e` the exact gradient, `measure` takes the inner product
:math:`\langle\mu, e\rangle`, the squares :math:`\|\mu\|^2` and :math:`\|e\|^2`, and :math:`V`, both for the
logits and for the encoder's weights. Every candidate of `CRITERIA` is a function of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import atanh, inf, isfinite, sqrt, tanh
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gapped import simplex
from gapped.diagnostics.moments import Moments
from gapped.errors import GappedError
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.score import draw_independent
from gapped_lab.environment import describe
from gapped_lab.fleet import Run, Trainer, derived_seed, matmul_precision
from gapped_lab.fleet.capture import Captured
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.recipe import Recipe
from gapped_lab.records import Gradient, Record, read, write
from gapped_lab.spec import RunSpec
from gapped_lab.tasks.vae import VAETask

if TYPE_CHECKING:
    from gapped_lab.report.tabular import Table

GUIDE = GumbelRao(0.7, samples=10)
"""The estimator that trains the weights at which all are measured."""
POINTS = (0.0, 0.1, 0.5, 1.0)
"""Where they are measured, in parts of the training."""
IMAGES, SAMPLES, DRAWS = 16, 400, 32
"""Images in the batch, gradients of each estimator, and draws for the exact gradient."""
QUICK_SAMPLES, QUICK_DRAWS = 8, 1
"""With --quick."""
LEVELS: tuple[Literal["logits", "weights"], ...] = ("logits", "weights")
# Entries of the samples that the exact gradient evaluates in one call; on a CPU, few enough to reuse memory.
_ON_CPU, _ON_GPU = 2**22, 2**28


def measure_missing(
    recipe: Recipe, folder: Path, device: torch.device, data_dir: Path | None
) -> Iterator[str]:
    """Measure the cells of each protocol whose lines the folder lacks; yields its name before."""
    known = {line.protocol for line in read(folder, Gradient)}
    cells: dict[str, dict[tuple[str, float | None], RunSpec]] = {}
    for entry in recipe.entries:
        cells.setdefault(entry.spec.protocol, {}).setdefault((entry.label, entry.spec.tau), entry.spec)
    for protocol, specs in cells.items():
        if protocol not in known:
            yield protocol
            labels = [label for label, _ in specs]
            effort = (QUICK_SAMPLES, QUICK_DRAWS) if recipe.quick else (SAMPLES, DRAWS)
            write(folder, list(measure([*specs.values()], labels, device, data_dir, *effort)))


def measure(
    specs: Sequence[RunSpec],
    labels: Sequence[str],
    device: torch.device,
    data_dir: Path | None,
    samples: int,
    draws: int,
) -> Iterator[Gradient]:
    """Measure the gradients of the estimators of `specs`, which have one protocol, at all points."""
    first = replace(specs[0], seed=1)
    guide = _trainer([first], [GUIDE], device, data_dir)
    copies = _trainer([first] * len(specs), [spec.make_estimator() for spec in specs], device, data_dir)
    environment: dict[str, Any] = dict(describe(device))
    task = copies.task
    assert isinstance(task, VAETask)
    probe = _Probe(task, copies.sampler, copies.generator)
    for point in POINTS:
        while guide.epoch < round(point * first.epochs):
            guide.train_epoch()
        for own, other in zip(task.model.parameters(), guide.task.model.parameters(), strict=True):
            own.data.copy_(other.data.expand_as(own))
        copies.generator.manual_seed(derived_seed("criterion", first.protocol, guide.epoch))
        with matmul_precision(device):
            measurements = probe.measure(samples, draws)
        for level in LEVELS:
            rows = measurements[level]
            for spec, label, numbers in zip(specs, labels, rows, strict=True):
                yield Gradient(
                    protocol=first.protocol,
                    data=first.data,
                    epoch=guide.epoch,
                    level=level,
                    label=label,
                    tau=spec.tau,
                    samples=samples,
                    images=IMAGES,
                    environment=environment,
                    **numbers,
                )


def _trainer(
    specs: Sequence[RunSpec], estimators: Sequence[Any], device: torch.device, data_dir: Path | None
) -> Trainer:
    first = specs[0]
    task = first.kind.task(specs, device, data_dir, False)
    rate = first.learning_rate or first.kind.rules(first.protocol).learning_rate
    runs = [Run(each, rate) for each in estimators]
    return Trainer(task, runs, first.epochs, first.seed, device, test_every=first.epochs)


class _Probe:
    """Moments of the gradients of all runs of a task, whose weights are equal, on one batch."""

    def __init__(self, task: VAETask, sampler: Grouped, generator: torch.Generator) -> None:
        self.task, self.sampler, self.generator = task, sampler, generator
        self.runs, self.model = len(task.seeds), task.model
        grey = task.pixels(task.test[:IMAGES].expand(1, -1, -1), generator)
        self.images = grey.expand(self.runs, -1, -1)
        self.weights = self.model.encoder_weights
        with torch.no_grad():
            logits = self.model.encode(self.images)
        self.sizes = {"logits": logits[0].numel(), "weights": sum(w[0].numel() for w in self.weights)}
        self.target = {k: torch.zeros(1, n, device=logits.device) for k, n in self.sizes.items()}
        like = {k: torch.zeros(self.runs, n, device=logits.device) for k, n in self.sizes.items()}
        self.moments = {k: Moments(each) for k, each in like.items()}
        self.cosine = {k: Moments(each[:, 0]) for k, each in like.items()}
        self.every = [*self.moments.values(), *self.cosine.values()]
        state = [tensor for each in self.every for tensor in each.tensors()]
        self._add = Captured(self._add_one, generator, lambda: state)

    def measure(self, samples: int, draws: int) -> dict[str, list[dict[str, float]]]:
        """What `Gradient` holds of every run, for logits and for weights, from so many gradients."""
        halves = [self._exact(draws) for _ in range(2)]
        for name in self.sizes:
            self.target[name].copy_((halves[0][name] + halves[1][name]) / 2)
        for each in self.every:
            each.reset()
        for _ in range(samples):
            self._add()
        rows = {}
        for name, moments in self.moments.items():
            target, mean, variance = self.target[name].double(), moments.mean, moments.variance
            total = variance.sum(1)
            # Products of independent halves, or of estimates less their noise, have no bias of their own.
            exact = float((halves[0][name] * halves[1][name]).sum())
            drop = target * mean / (mean.square() + variance).sqrt().clamp_min(1e-300)
            columns = {
                "inner": (mean * target).sum(1),
                "square": mean.square().sum(1) - total / samples,
                "variance": total,
                "exact": torch.full_like(total, exact),
                "cosine": self.cosine[name].mean / sqrt(max(exact, 1e-300)),
                "descent": drop.sum(1) / target.abs().sum(1),
            }
            rows[name] = [
                {key: float(values[i]) for key, values in columns.items()} for i in range(self.runs)
            ]
        return rows

    def _add_one(self) -> None:
        logits, _ = self.model.posterior(self.images)

        def cost(z: Tensor, part: Any) -> Tensor:
            decoder = [(w.weight[part.runs], w.bias[part.runs]) for w in self.model.decoder]  # type: ignore[index]
            return self.model.costs(z, self.images[part.runs], decoder)

        with self.sampler.frozen():
            leaf = logits.detach().requires_grad_()
            value = self.sampler.expectation(cost, leaf, self.generator, self.images)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        for name, flat in self._both(logits, gradient).items():
            self.moments[name].add(flat)
            self.cosine[name].add((flat * self.target[name]).sum(1) / flat.norm(dim=1).clamp_min(1e-30))

    def _both(self, logits: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """A gradient of the expected cost for the logits, and its image for the weights, flat."""
        slopes = torch.autograd.grad(logits, self.weights, gradient)
        runs = logits.shape[0]
        return {
            "logits": gradient.reshape(runs, -1),
            "weights": torch.cat([slope.reshape(runs, -1) for slope in slopes], 1),
        }

    def _exact(self, draws: int) -> dict[str, Tensor]:
        """The exact gradient up to the draw of the other variables: each variable summed out in turn."""
        one = slice(0, 1)
        decoder = [(w.weight[one], w.bias[one]) for w in self.model.decoder]  # type: ignore[index]
        logits = self.model.encode(self.images)[one]
        x, p = self.images[one], logits.detach().softmax(-1)
        _, count, variables, categories = p.shape
        total = torch.zeros_like(p)
        chunk = max((_ON_CPU if p.device.type == "cpu" else _ON_GPU) // (count * variables * categories), 1)
        with torch.no_grad():
            for _ in range(draws):
                z = simplex.one_hot(draw_independent(logits, 1, self.generator), categories, p.dtype)
                for variable in range(variables):
                    costs = []
                    for some in torch.split(torch.eye(categories, device=p.device), chunk):
                        points = z.expand(len(some), *z.shape[1:]).clone()
                        points[..., variable, :] = some.view(-1, 1, 1, categories)
                        costs.append(self.model.costs(points, x, decoder))
                    own, f = p[..., variable, :], torch.cat(costs).movedim(0, -1)
                    total[..., variable, :] += own * (f - (own * f).sum(-1, keepdim=True))
        whole = self.model.encode(self.images)
        spread = (total / draws).expand_as(whole)
        return {name: flat[one] for name, flat in self._both(whole, spread).items()}


def scale_free(line: Gradient, horizon: float) -> float:
    r"""The squared error left by the best multiple of a mean of `horizon` gradients, over :math:`\|e\|^2`.

    .. math:: \min_c \mathbb{E}\|c\,\bar g - e\|^2 / \|e\|^2
              = 1 - \langle\mu, e\rangle^2 / \bigl((\|\mu\|^2 + V/n)\,\|e\|^2\bigr)

    An inner product that is not positive leaves everything.
    """
    length = max(line.square, 0.0) + line.variance / horizon
    if line.inner <= 0 or length <= 0 or line.exact <= 0:
        return 1.0
    return 1 - line.inner**2 / (length * line.exact)


def _bias(line: Gradient) -> float:
    return sqrt(max(line.square - 2 * line.inner + line.exact, 0.0) / line.exact)


CRITERIA: Mapping[str, Callable[[Gradient], float]] = MappingProxyType(
    {
        "relative bias": _bias,
        "relative variance": lambda line: line.variance / line.exact,
        "mean squared error": lambda line: _bias(line) ** 2 + line.variance / line.exact,
        "1 - cosine": lambda line: 1 - line.cosine,
        **{f"scale-free error, {n:g} gradients": partial(scale_free, horizon=n) for n in (1, 10, 100, 1000)},
        "scale-free error of the mean": lambda line: scale_free(line, inf),
        "1 - descent under Adam": lambda line: 1 - line.descent,
    }
)
"""Candidates, all lower is better."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's correlation of a criterion with the trained result over the cells of one task."""

    value: float
    low: float
    high: float
    cells: int


def correlation(criterion: Sequence[float], result: Sequence[float]) -> Correlation:
    """Spearman's correlation with its 95% interval (Fisher's, with the variance of Bonett and Wright).

    >>> correlation([1, 2, 3, 4, 5], [1, 2, 3, 5, 4]).value
    0.9
    """
    from scipy.stats import spearmanr

    count = len(result)
    # A criterion that is the same everywhere ranks nothing.
    constant = min(len(set(criterion)), len(set(result))) < 2
    value = 0.0 if constant else float(spearmanr(criterion, result).statistic)
    half = 1.96 * sqrt((1 + value**2 / 2) / max(count - 3, 1))
    centre = atanh(min(max(value, -0.9999), 0.9999))
    return Correlation(round(value, 6), tanh(centre - half), tanh(centre + half), count)


def correlations(
    gradients: Sequence[Gradient], results: Mapping[tuple[str, str, float | None], float], level: str
) -> dict[str, dict[str, Correlation]]:
    """By criterion and protocol, over the cells that have both: a criterion is the mean over the points."""
    cells: dict[tuple[str, str, float | None], list[Gradient]] = {}
    for line in gradients:
        if line.level == level and (line.protocol, line.label, line.tau) in results:
            cells.setdefault((line.protocol, line.label, line.tau), []).append(line)
    protocols = list(dict.fromkeys(cell[0] for cell in cells))
    table: dict[str, dict[str, Correlation]] = {}
    for name, criterion in CRITERIA.items():
        for protocol in protocols:
            own = [cell for cell in cells if cell[0] == protocol]
            values = [float(np.mean([criterion(line) for line in cells[cell]])) for cell in own]
            table.setdefault(name, {})[protocol] = correlation(values, [results[cell] for cell in own])
    return table


def family_of(protocol: str) -> str:
    """What is left out together: protocols that differ in the number of categories, or in a ReLU, are kin.

    >>> family_of("codes-49x512"), family_of("plain-30x10"), family_of("paper-30x10")
    ('codes', 'mnist', 'mnist')
    """
    name = protocol.partition("-")[0]
    return "mnist" if name in ("paper", "plain") else name


def held_out(table: Mapping[str, Mapping[str, Correlation]]) -> dict[str, tuple[str, float]]:
    """For each family of tasks, the criterion that is best on the others, and its mean correlation here."""
    families = {protocol: family_of(protocol) for each in table.values() for protocol in each}
    chosen = {}
    for family in dict.fromkeys(families.values()):
        inside = [protocol for protocol, own in families.items() if own == family]
        outside = [protocol for protocol, own in families.items() if own != family]
        if not outside:
            raise GappedError("a criterion can only be tried on a task that it was not chosen on")
        best = max(table, key=lambda name: float(np.mean([table[name][p].value for p in outside])))
        chosen[family] = (best, float(np.mean([table[best][p].value for p in inside])))
    return chosen


def trained(records: Sequence[Record]) -> dict[tuple[str, str, float | None], float]:
    """The mean result of each cell of the records, by protocol, label and temperature; lower is better.

    A cell with a run that diverged is the worst of its task.
    """
    from gapped_lab.report.cells import groups, higher_is_better, primary

    means: dict[tuple[str, str, float | None], float] = {}
    for (_, protocol), cells in groups(records).items():
        metric = primary(cells)
        for cell in cells:
            mean = float(np.mean(cell.values(metric)))
            sign = -1 if higher_is_better(metric) else 1
            means[protocol, cell.label, cell.tau] = sign * mean if isfinite(mean) else inf
    return means


def summary(gradients: Sequence[Gradient], records: Sequence[Record]) -> tuple[Table, list[str]]:
    """Every criterion's mean and lowest correlation over the tasks, best first, and what leaving out says."""
    from gapped_lab.report.tabular import Entry, Table

    results = trained(records)
    rows, texts = [], []
    for level in LEVELS:
        table = correlations(gradients, results, level)
        for name, by_task in table.items():
            values = [each.value for each in by_task.values()]
            worst = min(by_task, key=lambda protocol: by_task[protocol].value)
            numbers = (Entry(f"{each:.2f}", each) for each in (float(np.mean(values)), min(values)))
            rows.append((Entry(name), Entry(level), *numbers, Entry(worst)))
        for family, (name, value) in held_out(table).items():
            texts.append(f"Gradients of {level}, chosen without {family}: {name}; there {value:.2f}.")
    rows.sort(key=lambda row: -(row[2].value or 0.0))
    titles = ("criterion", "gradient of", "mean correlation", "lowest", "on")
    return Table(titles, tuple(rows)), texts
