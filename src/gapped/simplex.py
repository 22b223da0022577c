"""Arithmetic on the probability simplex: normalising, drawing, perturbing.

Everything here acts on the last axis, in the dtype of its input, and is a plain function of tensors; the
only sources of randomness are `uniform` (and all that draws an index through it) and `log_exponential` (and
`gumbel` and `conditional_gumbel` through it).

Two conventions hold throughout. A category whose logit is -inf does not exist: it gets exactly zero mass.
A row without a sample has an index outside of the categories: `K` if it has no category (all -inf), `K + 1`
if it holds a NaN or +inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from gapped.checks import batched_with, check_logits, check_mask, in_eager_mode
from gapped.errors import reject

_GAP_GUARD = 1e-5
LEAST = -1e3
"""A category whose logit is so far below the largest has no mass in float64 either."""
# On a CPU, larger inputs are computed in blocks of so many numbers: intermediate results take little memory
# and stay in the cache.
BLOCK = 1 << 17
_PLAIN = (Tensor, torch.nn.Parameter)
_COMPUTED = (torch.float32, torch.float64)
# Up to so many categories a table of all one-hot rows is small beside a batch of them.
_FEW = 256


@dataclass(eq=False)
class Draw:
    """Everything random about a sample, and what an estimator does with its rows `(..., *rows, K)`.

    A vocabulary that is split over ranks does the same with the entries of one rank: see
    `gapped.vocabulary.sharded`.
    """

    category: Tensor
    """The category of each row, `(*rows)`."""
    noise: Tensor | None = None
    """Further noise of the surrogate, in the estimator's own form."""

    def softmax(self, scores: Tensor) -> Tensor:
        """The softmax of rows that have a law."""
        return torch.softmax(scores, -1)

    def log_softmax(self, scores: Tensor) -> Tensor:
        """The log-softmax of rows that have a law."""
        return torch.log_softmax(scores, -1)

    def total(self, values: Tensor) -> Tensor:
        """The sum of each row, `(*rows, 1)`."""
        return values.sum(-1, keepdim=True)

    def selected(self, values: Tensor) -> Tensor:
        """The entries of the drawn categories, `(*rows, 1)`."""
        return values.gather(-1, self.category.unsqueeze(-1))

    def put(self, values: Tensor, number: float) -> Tensor:
        """`values` with a number in the place of each drawn category's."""
        return values.scatter(-1, self.category.unsqueeze(-1), number)

    def add(self, values: Tensor, number: float) -> Tensor:
        """`values` with a number added to each drawn category's."""
        amount = torch.full_like(self.category, number, dtype=values.dtype).unsqueeze(-1)
        return values.scatter_add(-1, self.category.unsqueeze(-1), amount)


def computed(values: Tensor) -> Tensor:
    """`values` in the dtype that arithmetic is done in: float64 stays, all else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with -inf where `mask` is False, before anything is normalised: masking equals deleting."""
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def pairs(log_odds: Tensor) -> Tensor:
    """Logits of "on" and "off", `(*gates, 2)`, for the log-odds of gates: they and 0.

    Odds of +inf are certain, as those of -inf are: then one of the two categories does not exist.
    """
    certain = log_odds == torch.inf
    off = torch.zeros_like(log_odds).masked_fill(certain, -torch.inf)
    return torch.stack([log_odds.masked_fill(certain, 0.0), off], -1)


def logistic_slope(x: Tensor) -> Tensor:
    """The slope σ(x) σ(-x) of the logistic function, with all digits."""
    lesser = torch.sigmoid(-x.abs())
    return lesser - lesser.square()


def shift(logits: Tensor) -> Tensor:
    """Logits relative to the largest of their row, which becomes 0; a row with a NaN or +inf becomes NaN."""
    # The clamp is for rows without categories: -inf minus a finite number stays -inf.
    top = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    # Adding 0 * top changes +inf only, which becomes NaN. `torch.where` would lose the gradient's NaN.
    return logits - (top + 0 * top)


def per_row(level: float | Tensor, like: Tensor) -> float | Tensor:
    """A temperature or gap in a form that broadcasts against `(*rows, K)`.

    A negative entry, which only a tensor on a device can still hold, becomes NaN and so does its row.
    """
    if not isinstance(level, Tensor):
        return float(level)
    level = level.detach().to(device=like.device, dtype=like.dtype).unsqueeze(-1)
    return torch.where(level >= 0, level, torch.nan)


def divide(logits: Tensor, tau: float | Tensor) -> Tensor:
    """`logits` over a temperature that `per_row` returned; a no-op for 1."""
    return logits / tau if isinstance(tau, Tensor) or tau != 1 else logits


def softmax(logits: Tensor) -> Tensor:
    """Softmax whose rows without categories are zero instead of NaN."""
    return normalised(shift(logits))


def normalised(logits: Tensor) -> Tensor:
    """Softmax of logits that are at most 0, and 0 somewhere in each row that has a category."""
    weights = logits.exp()
    # The sum is at least 1, or 0 in a row without categories.
    return weights / weights.sum(-1, keepdim=True).clamp(min=0.5)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax whose rows without categories stay -inf instead of turning NaN."""
    exists = logits.amax(-1, keepdim=True) != -torch.inf
    # Replaced before, too: what is not selected must have a gradient that zero can be multiplied with.
    return torch.where(exists, torch.log_softmax(torch.where(exists, logits, 0.0), -1), -torch.inf)


def unimix(logits: Tensor, amount: float = 0.01, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Mix a categorical distribution with the uniform one, in its logits.

    No category becomes impossible. World models such as DreamerV3 take 1% of it before sampling:
    `gapped.gst(gapped.unimix(logits))`.

    Arguments:
        logits: Unnormalised log-probabilities θ, the categories on the axis `dim`.
        amount: The share a of the uniform distribution, from 0 to 1. 0 returns the log-softmax.
        dim: The category axis.
        mask: Booleans that broadcast against the logits. Categories where it is False, or whose logit is
            -inf, do not exist, and theirs is -inf: masking equals deleting.

    Returns:
        Normalised logits in the shape and dtype of `logits`, with their ordinary gradient. Half precision is
        computed in float32 and rounded once.

    For n categories that exist the result is computed in log space::

        log((1 - a) softmax(θ)_k + a/n)

    >>> unimix(torch.tensor([100.0, 0.0]), 0.5).exp()
    tensor([0.7500, 0.2500])

    References: Hafner, Pasukonis, Ba, Lillicrap (2023).
    """
    check_logits(logits, dim)
    check_mask(mask, logits, dim)
    if isinstance(amount, bool) or not isinstance(amount, Real) or not 0 <= amount <= 1:
        raise reject("amount", amount, "a number from 0 to 1")
    rows = computed(masked(logits, mask)).movedim(dim, -1)
    exists = rows.detach() != -torch.inf
    log_p = log_softmax(rows)
    if amount > 0:
        count = exists.sum(-1, keepdim=True).to(log_p.dtype)
        # Replaced before adding: the slope of a sum of two zeros is NaN in log space.
        kept = torch.where(exists, log_p, 0.0) + (math.log1p(-amount) if amount < 1 else -math.inf)
        log_p = torch.where(exists, torch.logaddexp(kept, math.log(amount) - count.log()), -torch.inf)
    return log_p.movedim(-1, dim).to(logits.dtype)


def draw_index(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one category per row from `softmax(θ)`: see `inverse_cdf`."""
    weights = shift(logits).exp_()
    return inverse_cdf(weights, generator) + weights[..., 0].isnan()


def inverse_cdf(
    weights: Tensor, generator: torch.Generator | None = None, samples: int | None = None
) -> Tensor:
    """Draw one category per row in proportion to non-negative `weights`, with one uniform per row.

    The draw is the first category whose cumulative weight exceeds `u Σ_j w_j`. The running sum is kept in
    float64, so the tail of a hundred thousand float32 weights is not rounded away. Zero weights leave the
    running sum unchanged and are never first to exceed anything. A `u` of the form `k/2⁵³ < 1` keeps
    `u Σ_j w_j` strictly below the sum after rounding, so some category always exceeds it.

    Returns int64 indices of shape `weights.shape[:-1]`; `K` for a row of zeros or NaNs, where nothing
    exceeds anything. With `samples`, so many independent draws per row, `(samples, *rows)`, that share the
    running sum.
    """
    cumulative = weights.cumsum(-1, dtype=_accumulator(weights))
    total = cumulative[..., -1:]
    if samples is None and in_eager_mode():
        threshold = torch.empty_like(total).uniform_(generator=generator).mul_(total)
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    if samples is None:
        threshold = uniform(total.shape, total, generator) * total
        # Under vmap torch copies, and warns, where only one of them is a batch.
        cumulative = batched_with(cumulative, threshold)
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    u = uniform((samples, *total.shape[:-1]), total, generator).movedim(0, -1)
    index = torch.searchsorted(cumulative, (u * total).contiguous(), right=True)
    return index.movedim(-1, 0).contiguous()


def draw_gates(log_odds: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Whether gates are on: `inverse_cdf` of the weights of their `pairs`, for one number each."""
    weight = log_odds.clamp(max=0.0).exp()
    # One of the two weights is 1.
    total = accumulated((-log_odds.abs()).exp()) + 1
    return weight > uniform(total.shape, total, generator) * total


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Uniform noise in [0, 1), in the dtype of `like` and where it is."""
    if in_eager_mode() and shape == like.shape:  # in a third of the time that `rand` takes
        return torch.empty_like(like).uniform_(generator=generator)
    if generator is None:  # torch.compile takes this keyword, even as None, for fixed shapes only
        return torch.rand(shape, dtype=like.dtype, device=like.device)
    return torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)


def argmax_index(scores: Tensor) -> Tensor:
    """The index of the largest score of each row."""
    top, index = scores.max(-1)
    index = torch.where(top == -torch.inf, scores.shape[-1], index)
    return torch.where(top.isnan(), scores.shape[-1] + 1, index)


def place(index: Tensor, categories: int) -> Tensor:
    """`index` with the category axis kept, for gather and scatter; rows without a sample point anywhere."""
    return index.clamp(max=categories - 1).unsqueeze(-1)


def one_hot(index: Tensor, categories: int, dtype: torch.dtype) -> Tensor:
    """One-hot rows, exactly 0 and 1; zero where the index is `K`, NaN where it is `K + 1`.

    >>> one_hot(torch.tensor([1, 2, 3]), 2, torch.float32)
    tensor([[0., 1.],
            [0., 0.],
            [nan, nan]])
    """
    if categories <= _FEW:
        # There are only K + 2 possible rows: looking them up takes a third of the time of writing them.
        rows = torch.eye(categories + 2, categories, dtype=dtype, device=index.device)
        rows[-1] = torch.nan
        return torch.nn.functional.embedding(index, rows)
    index, where = index.unsqueeze(-1), place(index, categories)
    background = torch.where(index > categories, torch.nan, 0.0).to(dtype)
    return background.expand(*index.shape[:-1], categories).scatter(-1, where, background + (index == where))


def lawful_one_hot(index: Tensor, like: Tensor) -> Tensor:
    """One-hot rows in the shape and dtype of `like`, for eager code on a CPU whose indices all fit."""
    categories = like.shape[-1]
    if categories <= _FEW:
        return torch.embedding(_identity(categories, like.dtype), index)
    rows = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return rows.scatter_(-1, index.unsqueeze(-1), 1.0)


@lru_cache(maxsize=64)
def _identity(categories: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(categories, dtype=dtype, device="cpu")


def gumbel(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise in the shape and dtype of `like`; always finite."""
    return log_exponential(like, generator).neg_()


def conditional_gumbel(
    log_p: Tensor, index: Tensor, samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw `log p + G` given that `index` is its argmax, `samples` times.

    With `E ~ Exp(1)` and normalised `log_p` (Fact 1 of the paper, in log space)::

        (log p + G)_i = -log E_i
        (log p + G)_j = -logaddexp(log E_j - log p_j, log E_i)

    Returns shape `(samples, *log_p.shape)`.
    """
    log_e = log_exponential(log_p.expand(samples, *log_p.shape), generator)
    where = place(index, log_p.shape[-1]).expand(samples, *index.shape, 1)
    winner = log_e.gather(-1, where)
    return torch.logaddexp(log_e - log_p, winner).scatter(-1, where, winner).neg_()


def conditional_noise(
    log_p: Tensor, category: Tensor, samples: int, generator: torch.Generator | None, wanted: bool
) -> Tensor | None:
    """`conditional_gumbel` if `wanted`.

    The generator's state after this call must not depend on whether the noise is wanted: activation
    checkpointing repeats a forward pass that wanted none. So noise that may be omitted has a generator of its
    own; where that is impossible, it is never omitted.
    """
    if log_p.device.type == "cpu" and in_eager_mode():
        seed = torch.randint(2**63 - 1, (), generator=generator, device="cpu")
        if not wanted:
            return None
        with suppress(RuntimeError):  # a fake tensor has no values
            generator = torch.Generator("cpu").manual_seed(int(seed))
    return conditional_gumbel(log_p, category, samples, generator)


def expected_gap(p: Tensor) -> Tensor:
    """Expected gap of the two largest perturbed logits, given the winner.

    Arguments:
        p: Probabilities of the winning categories, of any shape.

    Returns:
        The gaps, a tensor of the shape of `p`. The function is a `gap` for `gapped.gst`.

    With Gumbel noise added to the logits, and given that a category of probability p wins, the expected gap
    is -log(1 - p)/p (Lemma 1 of the paper). It tends to 1 as p → 0 and grows without bound as p → 1; there p
    is replaced by p (1 - 10⁻⁵), as in the published experiments.

    >>> expected_gap(torch.tensor([0.0, 0.5]))
    tensor([1.0000, 1.3863])
    """
    guarded = computed(p) * (1 - _GAP_GUARD)
    limits = torch.finfo(guarded.dtype)
    # For small p the derivative of the quotient loses digits; the series is then exact to the last one.
    series = 1 + guarded * (1 / 2 + guarded * (1 / 3 + guarded / 4))
    small = guarded < limits.eps**0.25 / 4
    quotient = -torch.log1p(-guarded) / guarded.clamp(min=limits.tiny)
    return torch.where(small, series, quotient).to(p.dtype)


def log_expected_odds(log_p: Tensor) -> Tensor:
    """The logarithm of a losing category's expected odds against the winner, by its log-probability.

    Add Gumbel noise to the logits, `z = log p + G`, and let `i` win. Then::

        E[exp(z_j - z_i) | i] = p_j (-log p_j - 1 + p_j) / (1 - p_j)²

    whoever the winner is: between 0 and 1/2, and about `p_j log(1/p_j)` for rare categories.

    >>> log_expected_odds(torch.tensor([0.01, 0.1, 1.0]).log()).exp()
    tensor([0.0369, 0.1732, 0.5000])
    """
    loss = -torch.expm1(log_p)
    # Next to 1 the numerator and the square vanish together; the series is then exact to the last digit.
    near = loss < (0.03 if log_p.dtype == torch.float32 else 1e-3)
    series = 1 / 2 + loss * (1 / 3 + loss * (1 / 4 + loss * (1 / 5 + loss / 6)))
    quotient = (-log_p - loss) / loss.masked_fill(near, 1.0).square()
    odds = log_p + torch.where(near, series, quotient).log()
    return torch.where(log_p == -torch.inf, -torch.inf, odds)


def halfway_odds(logits: Tensor, weights: Tensor, total: Tensor, one: float | Tensor = 1.0) -> Tensor:
    """The expected odds of losing categories at half of their probability: those of `gapped.gapmax`.

    With finite logits relative to the largest of their row, their exponentials `weights`, and `total` the sum
    of these, the probabilities are p = weights/total, and the odds those of `log_expected_odds` at p/2. There
    nothing cancels, and nothing else is exponentiated. A `one` that is a tensor saves making it of a number.

    >>> halfway_odds(torch.tensor([0.0, -1e3]), torch.tensor([1.0, 0.0]), torch.tensor([1.0]))
    tensor([0.3863, 0.0000])
    """
    double = total + total
    half = weights / double
    loss = one - half
    # In place, beginning with the surprise -log(p/2): small batches are bound by the number of operations.
    odds = double.log_() - logits
    return odds.sub_(one).add_(half).mul_(half).div_(loss.mul_(loss))


def log_exponential(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The logarithm of unit exponentials: Gumbel noise with its sign reversed; always finite."""
    # On a GPU torch's float32 exponentials end at 6e-8, and categories rarer than that would never win.
    dtype = like.dtype if like.device.type == "cpu" else _accumulator(like)
    if in_eager_mode():
        draws = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    else:
        # A sum of no random numbers. Compilers take two equal calls of `exponential_` for one unless their
        # inputs are random, and only a random input is a batch where vmap has different randomness.
        draws = torch.rand((0, *like.shape), dtype=dtype, device=like.device).sum(0)
    # The clamp keeps an underflow to zero from becoming -inf.
    draws = draws.exponential_(generator=generator).clamp(min=torch.finfo(like.dtype).tiny)
    return draws.log_().to(like.dtype)


def accumulated(weights: Tensor) -> Tensor:
    """`weights` in the dtype that sums are kept in."""
    return weights.to(_accumulator(weights))


def _accumulator(weights: Tensor) -> torch.dtype:
    """The dtype that running sums are kept in: float64, but for devices that have none."""
    return torch.float32 if weights.device.type == "mps" else torch.float64


def needs_blocks(values: Tensor, numbers: int = 1) -> bool:
    """Whether `values` are computed block by block: large ones are, in eager code on a CPU.

    Each of them may stand for several `numbers`.
    """
    return values.device.type == "cpu" and in_eager_mode() and values.numel() * numbers > BLOCK


def is_plain(logits: Tensor) -> bool:
    """Whether these are logits that eager code on a CPU computes as they are."""
    return (
        in_eager_mode()
        and type(logits) in _PLAIN
        and logits.dtype in _COMPUTED
        and logits.is_cpu
        and logits.layout == torch.strided
        and not logits.is_nested
        and logits.dim() > 0
        and logits.numel() > 0
    )


def blocks(rows: int, numbers: int) -> Iterator[slice]:
    """Slices of `rows` that have `numbers` each: a slice has one row or at most `BLOCK` numbers."""
    return slices(rows, max(BLOCK // max(numbers, 1), 1))


def slices(rows: int, step: int) -> Iterator[slice]:
    """Slices of `step` rows; the last one ends with the rows."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def row_entries(values: Tensor, shape: torch.Size, rows: slice, further: int = 0) -> Tensor:
    """The entries that `values` have for some of the rows, which are `shape` in all and counted in order.

    `values` broadcast to `(*shape, ...)`, with so many `further` axes behind those of the rows. Contiguous
    ones that have an entry for each row are not copied.

    >>> row_entries(torch.tensor([[1.0], [2.0]]), torch.Size([2, 3]), slice(1, 4))
    tensor([1., 1., 2.])
    """
    values = values[(None,) * (len(shape) + further - values.dim())]
    rest = values.shape[len(shape) :]
    if values.shape[: len(shape)] == shape and values.is_contiguous():
        return values.view(shape.numel(), *rest)[rows]
    every = values.expand(*shape, *rest)
    numbers = torch.arange(rows.start, rows.stop, device=values.device)
    return every[torch.unravel_index(numbers, shape)]


def draw_key(logits: Tensor, generator: torch.Generator | None, count: int = 1) -> Tensor:
    """Random keys for calls, drawn on the device: a CUDA graph draws new ones at every replay."""
    return torch.randint(2**62, (count,), device=logits.device, generator=generator)
