"""The four properties of a surrogate (section 3 of the paper), measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill, indent
from typing import NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_generator, check_logits, holds
from gapped.errors import GappedError, reject
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.simplex import per_row

# Rows and categories of the normal logits that are taken where none are given.
ROWS, CATEGORIES = 32, 5
# Expected draws in a cell below which the chi-squared approximation is poor.
SMALLEST_CELL = 25.0
# Characters in a printed line.
WIDTH = 80
# Beyond rounding in float64.
ROUNDING = 1e-9
NAMES = ("follows the logits' law", "consistency", "zero-gradient perturbation", "strict gap")


@dataclass(frozen=True)
class Finding:
    """Whether one property holds, and the evidence."""

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
    """The four findings about an estimator; prints as a list, and indexes by the property's number."""

    estimator: Pathwise
    findings: tuple[Finding, ...]

    def __getitem__(self, number: int) -> Finding:
        return self.findings[number]

    def __repr__(self) -> str:
        return f"Properties({self.estimator}: {', '.join(finding.verdict for finding in self.findings)})"

    def __str__(self) -> str:
        lines = [fill(str(self.estimator), WIDTH, subsequent_indent="    ")]
        for f in self.findings:
            lines.append(f"  {f.number} {f.name.ljust(max(map(len, NAMES)))}  {f.verdict}, {f.cases:,} cases")
            lines.append(indent(fill(f.evidence, WIDTH - 4), "    "))
        return "\n".join(lines)


class _Draws(NamedTuple):
    """Hard samples, their surrogates and their gradients: first axis draws, second rows."""

    category: Tensor
    points: Tensor
    tau: float | Tensor
    weight: Tensor
    gradient: Tensor


def properties(
    estimator: Pathwise | str,
    logits: Tensor | None = None,
    *,
    draws: int = 4000,
    level: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Properties:
    """Measure which of the paper's four properties an estimator has.

    Arguments:
        estimator: A pathwise one, as an object or as text.
        logits: `(*rows, K)`; without it, 32 rows of 5 standard normal logits are drawn.
        draws: Samples per row for property 0; the others take a tenth of them.
        level: The probability that the test of property 0 rejects a correct estimator.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        An object that prints as a list. `result[1]` is the finding about property 1, with its `verdict`
        ("holds", "does not hold", "not applicable") and the `evidence`.

    The properties are those of section 3 of the paper, where straight-through Gumbel-softmax has all of them:

    0. *Following p*: the hard sample has the law softmax(θ). A chi-squared test over all rows.
    1. *Consistency*: the surrogate h is largest at the drawn category. Every draw must agree; a tie agrees,
       as in the paper's ablation, where GST without a gap is consistent.
    2. *Zero-gradient perturbation*: h = softmax((θ + m)/τ) with m constant, or a mean of such. Then the
       gradient is the mean of J(h) g/τ, and every one must be.
    3. *Strict gap*: given the category, the two largest perturbed logits θ + m are apart in expectation. A
       gap is never negative, so a single positive one proves it, without an error rate. The evidence is the
       least mean over rows and categories. As in the paper's ablation, the largest one need not be the drawn
       category: that is property 1.

    An estimator without a soft sample, such as ReinMax, has no surrogate: only property 0 applies to it.
    Everything is computed in float64.

    >>> g = torch.Generator().manual_seed(0)
    >>> [finding.verdict for finding in properties("gst:gap=0.0", generator=g).findings]
    ['holds', 'holds', 'holds', 'does not hold']
    """
    estimator = resolve_pathwise(estimator)
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
    law = _test_law(hard, rows, draws, level, generator)
    try:
        replace(estimator, hard=False)
    except GappedError:
        nothing = [Finding(number, None, "no soft sample", 0, {}) for number in (1, 2, 3)]
        return Properties(estimator, (law, *nothing))
    sample = _draw(hard, rows.expand(draws // 10, *rows.shape), generator)
    return Properties(
        estimator, (law, _test_consistency(sample), _test_perturbation(sample), _test_gap(sample))
    )


def _test_law(
    estimator: Pathwise, rows: Tensor, draws: int, level: float, generator: torch.Generator | None
) -> Finding:
    samples = estimator.sample(rows.expand(draws, *rows.shape), generator=generator)
    counts = (samples == 1).sum(0).double().flatten(end_dim=-2)
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
    for row in zip(expected.tolist(), counts.tolist(), strict=True):
        cells = _pool(*row)
        statistic += sum((count - mean) ** 2 / mean for mean, count in cells)
        freedom += len(cells) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def _pool(expected: Sequence[float], counts: Sequence[float]) -> list[tuple[float, float]]:
    """Cells of (expected, count), merged from the small end until each expects enough.

    >>> _pool([70.0, 20.0, 10.0], [66.0, 25.0, 9.0])
    [(30.0, 34.0), (70.0, 66.0)]
    """
    cells = [(0.0, 0.0)]
    for mean, count in sorted(zip(expected, counts, strict=True)):
        smaller = cells.pop() if cells[-1][0] < SMALLEST_CELL else (0.0, 0.0)
        cells.append((smaller[0] + mean, smaller[1] + count))
    return cells


def _draw(estimator: Pathwise, rows: Tensor, generator: torch.Generator | None) -> _Draws:
    """Hard samples with gradients, and the surrogates of the very same draws."""
    seed = int(torch.randint(2**62, (), generator=generator, device=rows.device))
    leaf = rows.clone().requires_grad_()
    weight = torch.randn(rows.shape, generator=_source(seed + 1, rows), dtype=rows.dtype, device=rows.device)
    sample = estimator.sample(leaf, generator=_source(seed, rows))
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    outcome = estimator.outcome(rows, _source(seed, rows), True)
    assert outcome.gradient is not None
    tau = per_row(estimator.tau, rows)
    return _Draws(sample.argmax(-1, keepdim=True), outcome.gradient.points, tau, weight, gradient)


def _source(seed: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def _test_consistency(sample: _Draws) -> Finding:
    h = sample.points.mean(0)
    behind = (h.amax(-1, keepdim=True) - h.gather(-1, sample.category)).squeeze(-1)
    wrong, cases, worst = int((behind > ROUNDING).sum()), behind.numel(), float(behind.max())
    evidence = f"{wrong:,} surrogates are largest elsewhere" + (f", by up to {worst:.3f}" if wrong else "")
    return Finding(1, wrong == 0, evidence, cases, {"wrong": wrong, "largest_difference": worst})


def _test_perturbation(sample: _Draws) -> Finding:
    q, g = sample.points, sample.weight
    expected = (q * (g - (q * g).sum(-1, keepdim=True))).mean(0) / sample.tau
    off = (sample.gradient - expected).abs().amax(-1) / expected.abs().max().clamp(min=ROUNDING)
    wrong, worst = int((off > ROUNDING).sum()), float(off.max())
    evidence = f"{wrong:,} gradients are not J(h) g / τ, relative difference at most {worst:.2g}"
    return Finding(2, wrong == 0, evidence, off.numel(), {"wrong": wrong, "largest_difference": worst})


def _test_gap(sample: _Draws) -> Finding:
    perturbed = sample.tau * sample.points.log()
    largest = perturbed.topk(2, -1).values
    gap = (largest[..., 0] - largest[..., 1]).mean(0)
    one_hot = simplex.one_hot(sample.category.squeeze(-1), perturbed.shape[-1], gap.dtype)
    counts = one_hot.sum(0)
    means = (gap.unsqueeze(-1) * one_hot).sum(0) / counts
    cases, none = int((counts > 0).sum()), int((means <= ROUNDING).sum())
    # The mean of a few draws shows whether there is a gap, but not how large it is.
    least = float(means[counts >= min(SMALLEST_CELL, float(counts.max()))].min())
    evidence = f"{none:,} mean gaps are 0, the least over {SMALLEST_CELL:.0f} draws or more is {least:.3g}"
    return Finding(3, none == 0, evidence, cases, {"without": none, "least_gap": least})
