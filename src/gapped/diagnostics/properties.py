"""Properties 0 to 3 of the paper (section 3), measured on any estimator whose sample carries the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_generator, check_logits, holds
from gapped.errors import GappedError, reject
from gapped.pathwise import Pathwise, per_row

# How many rows of how many normal logits are looked at where none are given.
ROWS, CATEGORIES = 32, 5
# The chi-squared law of a cell needs it to expect about so many draws.
SMALLEST_CELL = 25.0
# Beyond rounding in float64.
ROUNDING = 1e-9
NAMES = ("follows the logits' law", "consistency", "zero-gradient perturbation", "strict gap")


@dataclass(frozen=True)
class Finding:
    """What was found about one property."""

    number: int
    holds: bool | None
    """None where the property does not apply."""
    evidence: str
    cases: int
    """How many draws, gradients or means the verdict rests on."""
    measured: Mapping[str, float]
    """The numbers in `evidence`, by name."""

    @property
    def name(self) -> str:
        return NAMES[self.number]

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not applicable"}[self.holds]


@dataclass(frozen=True)
class Properties:
    """The four findings about an estimator; prints as a table, and indexes by the property's number."""

    estimator: Pathwise
    findings: tuple[Finding, ...]

    def __getitem__(self, number: int) -> Finding:
        return self.findings[number]

    def __str__(self) -> str:
        rows = [("property", "", "evidence", "cases")]
        rows += [(f"{f.number} {f.name}", f.verdict, f.evidence, f"{f.cases:,}") for f in self.findings]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3].rjust(widths[3])]) for row in rows
        ]
        return "\n".join([str(self.estimator), *lines])


@dataclass(frozen=True)
class _Surrogate:
    """Draws with everything about them: first axis draws, second rows."""

    chosen: Tensor
    points: Tensor
    tau: float | Tensor
    weight: Tensor
    gradient: Tensor


def properties(
    estimator: Pathwise,
    logits: Tensor | None = None,
    *,
    draws: int = 4000,
    level: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Properties:
    r"""Measure which of the paper's properties (section 3, where STGS has all of them) an estimator has.

    0. *Following* :math:`p`: the hard sample has the law :math:`\mathrm{softmax}(\theta)`. A chi-squared
       test over all rows; a correct estimator is accused with probability `level`.
    1. *Consistency*: the surrogate :math:`h` is largest at the drawn category. Every draw must agree; a tie
       agrees, as in the paper's ablation, where GST without a gap is consistent.
    2. *Zero-gradient perturbation*: :math:`h = \mathrm{softmax}((\theta + m)/\tau)` with :math:`m` constant,
       or a mean of such. Then the gradient is the mean of :math:`J(h)\,g/\tau`, and every one must be.
    3. *Strict gap*: given the category, the two largest perturbed logits :math:`\theta + m` are apart in
       expectation. A gap is never negative, so one that is seen proves it: no error rate is needed. The
       evidence is the least mean over rows and categories. As in the paper's ablation, the largest one
       need not be the drawn category: that is property 1.

    `logits` has shape ``(*rows, K)``; without it, 32 rows of 5 standard normal logits are drawn. Property 0
    uses `draws` samples a row, the others a tenth of them. An estimator without a soft sample, such as
    ReinMax, has no surrogate: only property 0 applies to it. Everything is computed in float64.

    >>> from gapped.pathwise.gst import GST
    >>> g = torch.Generator().manual_seed(0)
    >>> [finding.verdict for finding in properties(GST(gap=0.0), generator=g).findings]
    ['holds', 'holds', 'holds', 'does not hold']
    """
    if not isinstance(estimator, Pathwise):
        raise reject("estimator", f"an object of type {type(estimator).__name__}", "a pathwise estimator")
    check_count("draws", draws, 100)
    if isinstance(level, bool) or not isinstance(level, float) or not 0 < level < 1:
        raise reject("level", level, "a number between 0 and 1")
    if logits is None:
        logits = torch.randn(ROWS, CATEGORIES, generator=generator, dtype=torch.float64)
    check_logits(logits)
    check_generator(generator, logits)
    if logits.shape[-1] < 2 or holds(~logits.isfinite()):
        raise reject("logits", "a tensor of other logits", "finite ones, of at least two categories")
    rows = logits.detach().double()
    hard = replace(estimator, hard=True)
    law = _follows(hard, rows, draws, level, generator)
    if not _has_surrogate(estimator):
        nothing = [Finding(number, None, "no soft sample", 0, {}) for number in (1, 2, 3)]
        return Properties(estimator, (law, *nothing))
    seen = _surrogate(hard, rows.expand(draws // 10, *rows.shape), generator)
    return Properties(estimator, (law, _consistent(seen), _zero_gradient(seen), _strict_gap(seen)))


def _has_surrogate(estimator: Pathwise) -> bool:
    try:
        replace(estimator, hard=False)
    except GappedError:
        return False
    return True


def _follows(
    estimator: Pathwise, rows: Tensor, draws: int, level: float, generator: torch.Generator | None
) -> Finding:
    drawn = estimator.sample(rows.expand(draws, *rows.shape), generator=generator)
    counts = (drawn == 1).sum(0).double().flatten(end_dim=-2)
    expected = draws * simplex.softmax(rows).flatten(end_dim=-2)
    broken = int((counts.sum(-1) != draws).sum())
    p = 0.0 if broken else _chi_squared(counts, expected)
    off = float((counts - expected).abs().max()) / draws
    evidence = f"p-value {p:.2g}, frequencies off by at most {off:.3f}"
    if broken:
        evidence = f"samples of {broken} rows are not one-hot"
    return Finding(0, p >= level, evidence, draws * len(counts), {"p_value": p, "largest_difference": off})


def _chi_squared(counts: Tensor, expected: Tensor) -> float:
    """P-value of the counts of all rows together; rare categories are pooled."""
    statistic, freedom = 0.0, 0
    for found, means in zip(counts.tolist(), expected.tolist(), strict=True):
        cells = _pooled(sorted(zip(means, found, strict=True), reverse=True))
        statistic += sum((count - mean) ** 2 / mean for mean, count in cells)
        freedom += len(cells) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def _pooled(cells: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Cells of (expected, found), largest first, merged from the small end until each expects enough.

    >>> _pooled([(70.0, 66.0), (20.0, 25.0), (10.0, 9.0)])
    [(70.0, 66.0), (30.0, 34.0)]
    """
    *larger, (mean, count) = cells
    while larger and mean < SMALLEST_CELL:
        more = larger.pop()
        mean, count = mean + more[0], count + more[1]
    return [*_pooled(larger), (mean, count)] if larger else [(mean, count)]


def _surrogate(estimator: Pathwise, rows: Tensor, generator: torch.Generator | None) -> _Surrogate:
    """The gradient of hard samples, and the points of the very same draws."""
    seed = int(torch.randint(2**62, (), generator=generator, device=rows.device))
    leaf = rows.clone().requires_grad_()
    weight = torch.randn(rows.shape, generator=_source(seed + 1, rows), dtype=rows.dtype, device=rows.device)
    sample = estimator.sample(leaf, generator=_source(seed, rows))
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    outcome = estimator.outcome(rows, _source(seed, rows), True)
    assert outcome.gradient is not None
    tau = per_row(estimator.tau, rows)
    return _Surrogate(sample.argmax(-1, keepdim=True), outcome.gradient.points, tau, weight, gradient)


def _source(seed: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def _consistent(seen: _Surrogate) -> Finding:
    h = seen.points.mean(0)
    behind = (h.amax(-1, keepdim=True) - h.gather(-1, seen.chosen)).squeeze(-1)
    wrong, cases, worst = int((behind > ROUNDING).sum()), behind.numel(), float(behind.max())
    evidence = f"{wrong:,} surrogates are largest elsewhere" + (f", by up to {worst:.3f}" if wrong else "")
    return Finding(1, wrong == 0, evidence, cases, {"wrong": wrong, "largest_difference": worst})


def _zero_gradient(seen: _Surrogate) -> Finding:
    q, g = seen.points, seen.weight
    expected = (q * (g - (q * g).sum(-1, keepdim=True))).mean(0) / seen.tau
    off = (seen.gradient - expected).abs().amax(-1) / expected.abs().max().clamp(min=ROUNDING)
    wrong, worst = int((off > ROUNDING).sum()), float(off.max())
    evidence = f"{wrong:,} gradients are not J(h) g / τ, relative difference at most {worst:.2g}"
    return Finding(2, wrong == 0, evidence, off.numel(), {"wrong": wrong, "largest_difference": worst})


def _strict_gap(seen: _Surrogate) -> Finding:
    perturbed = seen.tau * seen.points.log()
    largest = perturbed.topk(2, -1).values
    gap = (largest[..., 0] - largest[..., 1]).mean(0)
    given = simplex.one_hot(seen.chosen.squeeze(-1), perturbed.shape[-1], gap.dtype)
    counts = given.sum(0)
    means = (gap.unsqueeze(-1) * given).sum(0) / counts
    cases, none = int((counts > 0).sum()), int((means <= ROUNDING).sum())
    # The mean of a handful of draws says whether there is a gap, but not how large it is.
    least = float(means[counts >= min(SMALLEST_CELL, float(counts.max()))].min())
    evidence = f"{none:,} mean gaps are 0, the least over {SMALLEST_CELL:.0f} draws or more is {least:.3g}"
    return Finding(3, none == 0, evidence, cases, {"without": none, "least_gap": least})
