"""The front door: a sample of one category per row, or a choice of one or several by index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor

from gapped.docstrings import documented
from gapped.errors import GappedError
from gapped.pathwise import Pathwise, Source, resolve_pathwise

if TYPE_CHECKING:
    from gapped.choice import Choice
    from gapped.choices import Choices, Law


F = TypeVar("F", bound=Callable[..., Any])


def _without_levels(function: F) -> F:
    """Answer a call with the options of `F.gumbel_softmax` by a line that says where they went."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        name = function.__name__
        for value in args[1:2]:
            if isinstance(value, Pathwise | str):
                raise GappedError(f"{name}: an estimator has a keyword: {name}(logits, estimator={value!r})")
        if args[1 if name == "sample" else 2 :] or options.keys() & {"tau", "hard"}:
            raise GappedError(
                f"{name}: it is hard and has no temperature; gapped.gumbel_softmax(logits, tau, hard) takes "
                "both, and a text such as estimator='gst:tau=0.5' a temperature"
            )
        if name == "sample" and options.keys() & {"draw", "k"}:
            raise GappedError(
                "sample: it draws one category; gapped.choose takes draw='argmax' and k=2, gapped.subset "
                "k=2, and a text such as estimator='gapmax:draw=argmax' the largest logit"
            )
        return function(*args, **options)

    return cast(F, call)


@_without_levels
@documented
def sample(
    logits: Tensor,
    *,
    estimator: Pathwise | str | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a one-hot sample that carries a gradient.

    It stands where `F.gumbel_softmax(logits, hard=True)` stood, and has no temperature.

    Returns:
        A tensor of the shape and dtype of `logits` whose rows are exactly one-hot, unless the estimator is a
        soft one. A row where nothing is allowed is zero, a row with a NaN or +inf is NaN.

    The category is drawn from softmax(θ), whatever the estimator; the gradient is the estimator's.

    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> z = sample(logits, generator=torch.Generator().manual_seed(0))
    >>> z.detach()
    tensor([[0., 0., 1.],
            [0., 0., 1.]])
    >>> z[:, 0].sum().backward()
    >>> logits.grad.shape
    torch.Size([2, 3])
    """
    return resolve_pathwise(estimator).sample(logits, dim=dim, mask=mask, generator=generator)


@overload
def choose(
    logits: Tensor,
    k: None = None,
    *,
    estimator: Pathwise | str | None = None,
    draw: Source | None = None,
    law: Law = "subset",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Choice: ...
@overload
def choose(
    logits: Tensor,
    k: int,
    *,
    estimator: Pathwise | str | None = None,
    draw: Source | None = None,
    law: Law = "subset",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Choices: ...
@_without_levels
@documented
def choose(
    logits: Tensor,
    k: int | None = None,
    *,
    estimator: Pathwise | str | None = None,
    draw: Source | None = None,
    law: Law = "subset",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Choice | Choices:
    """Draw one category per row by its index, or k distinct ones.

    For look-ups and routers: `gapped.sample`, or a set of k, without the zeros and ones, which are never
    written. It draws in evaluation, too, unless `draw` says otherwise.

    Arguments:
        k: How many categories are drawn, from 1 to K. None is one, without an axis for it.
        estimator: A pathwise one, as an object or its text; None is the default, GapMax, and for sets of more
            than one category the one below.
        draw: "sample"; "argmax" takes the k largest logits, with the estimator's gradient for them. None is
            the estimator's own.
        law: "subset", the law of `gapped.subset`, or "sequential", one category after the other.

    Returns:
        For k categories a `Choices`: `index`, `(*rows, k)`; `gate()`, ones that carry the gradient, of the
        same shape; `weights()`, the gates times the normalised probabilities of the drawn categories;
        `select(table)` and `log_prob`. Without k a `Choice`, whose `index` has the shape of the logits
        without the category axis; `select(table)` looks up entries, and `gate()` is a 1 for each row. For its
        `log_prob` take `k=1`. An index has no gradient; gates, weights and what is selected have all of it
        each, so a cost uses one of them.

    Under "subset" the set S has a probability in proportion to Π_{i ∈ S} exp(θ_i), with the marginals μ. A
    gradient g at its zeros and ones becomes, in one of three ways::

        (Cov(S) g + (S - μ) ⟨S - μ, g⟩) / 2        "reinmax", the default
        Cov(S) g                                   "straight-through", also with a temperature
        Cov(S') g / τ                              "gst:gap=1", the S' of logits with a gap

    The first is exact on average for costs up to quadratic in S, the second for linear ones. Under
    "sequential" each category is drawn from the softmax of those that are left, and has the gradient of a
    single choice, given those before it: any estimator without further noise will do.

    A row with fewer than k categories has all of them drawn; the places that are left have index K and a
    gate of zero. A row with a NaN or +inf has index K + 1 and gates of NaN. With k, or where a kernel
    drew, the logits must not be changed before the backward pass, and autograd notices.

    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> choice = choose(logits, generator=torch.Generator().manual_seed(0))
    >>> choice.index.shape, choice.select(torch.eye(4)).shape, choice.gate()
    (torch.Size([2]), torch.Size([2, 4]), tensor([1., 1.], grad_fn=<_WithPullBackward>))
    >>> choices = choose(logits, k=2)
    >>> choices.index.shape, choices.weights().sum(-1)
    (torch.Size([2, 2]), tensor([1., 1.], grad_fn=<SumBackward1>))

    References: Liu, Dong, Liu, Yu, Gao (2023) for ReinMax; Ahmed, Zeng, Niepert, Van den Broeck (2023) for
    the gradient of sets; Plackett (1975) for sequences.
    """
    if k is None:
        resolved = resolve_pathwise(estimator)
        resolved = resolved if draw is None else replace(resolved, draw=draw)
        return resolved.choose(logits, dim=dim, mask=mask, generator=generator)
    from gapped.choices import choose

    return choose(estimator, logits, k, law, draw, dim, mask, generator)
