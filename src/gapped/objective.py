"""One expectation for both families of estimators."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import (
    check_flag,
    check_generator,
    check_logits,
    check_mask,
    check_scores,
    depends_on,
    nodes_of,
    requires_grad,
)
from gapped.errors import reject
from gapped.gradient import is_differentiated, with_gradient
from gapped.pathwise import Pathwise
from gapped.registry import resolve
from gapped.score import Cost, Score, check_costs, drop_absent, without_derivative
from gapped.score.trainable import Trainable


def expectation(
    f: Callable[[Tensor], Tensor],
    logits: Tensor,
    estimator: Pathwise | Score | str | None = None,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    context: Tensor | None = None,
    gates: bool = False,
) -> Tensor:
    """Estimate an expected cost E f(D), D ~ softmax(θ), and its gradient.

    Arguments:
        f: The cost: a function that maps one-hot tensors `(n, *batch, *variables, K)` to costs `(n, *batch)`;
            the estimator chooses `n`. Which of the logits' axes are the batch is read off the costs. All
            variables of an example share its cost; examples are independent of each other. `gapped.MuProp`,
            `gapped.REBAR` and `gapped.RELAX` also call `f` with probabilities in place of one-hot rows. `f`
            may write into its input.
        logits: Unnormalised log-probabilities θ, `(*batch, *variables, K)`.
        estimator: One of either family, such as `gapped.GapMax()` or `gapped.RLOO(4)`, or its text such as
            "rloo:samples=4"; with hard samples. None is the default, GapMax. One that learns, such as
            `gapped.NVIL`, must be an object: its text makes a new one at every call.
        mask: Booleans that broadcast against the logits. Categories where it is False, or whose logit is
            -inf, do not exist and get exactly zero gradient.
        generator: Where random numbers come from; None is torch's default generator.
        context: The input of a learned baseline, for `gapped.NVIL` alone.
        gates: True if the variables are gates, as in `gapped.gate`: then `logits` are log-odds `(*batch,
            *variables)`, and `f` maps zeros and ones `(n, *batch, *variables)` to costs. A gate is the pair
            of logits (logit, 0) to every estimator, so `gapped.DisARM` takes them too.

    Returns:
        Costs of the shape of the batch. Each is the mean cost of the samples that the estimator draws. Its
        gradient with respect to the logits is the estimator's; with respect to anything else that `f` depends
        on, the ordinary one. Without a gradient to estimate, `f` is evaluated at the samples only.

    >>> import gapped
    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> target = torch.tensor([1.0, 0.0, 0.0])
    >>> cost = lambda z: (z.mean(-2) - target).square().sum(-1)
    >>> expectation(cost, logits, gapped.Exact()).backward()
    >>> logits.grad[0]
    tensor([-0.2222,  0.1111,  0.1111])
    >>> odds = torch.zeros(5, requires_grad=True)
    >>> expectation(lambda b: (b.sum(-1) - 2) ** 2, odds, "disarm", gates=True).backward()
    """
    (check_scores if gates else check_logits)(logits)
    check_mask(mask, logits)
    check_generator(generator, logits)
    check_flag("gates", gates)
    if not callable(f):
        raise reject("f", f"an object of type {type(f).__name__}", "a function from samples to costs")
    if isinstance(estimator, str):
        estimator = resolve(estimator)
        if isinstance(estimator, Trainable):
            kind = type(estimator).__name__
            warnings.warn(
                f"estimator: the text {estimator.name!r} makes a new {kind} at every call, which learns "
                f"nothing; make an object gapped.{kind}(...) once",
                stacklevel=2,
            )
    estimator = resolve(estimator)
    if isinstance(estimator, Pathwise):
        if not estimator.hard:
            accepted = "hard=True: the mean cost of soft samples is not the expected cost of hard ones"
            raise reject("estimator", f"{type(estimator).__name__} with hard=False", accepted)
        if context is not None:
            raise reject("context", "a tensor", "None: a pathwise estimator has no learned baseline")
        draw = estimator.gate if gates else estimator.sample
        drawn = draw(logits, mask=mask, generator=generator)
        is_traced = torch.compiler.is_compiling()
        # Read before `f` may write into the sample.
        wants_gradient, sources = requires_grad(drawn), set() if is_traced else nodes_of(drawn)
        sample = drawn.unsqueeze(0)
        costs = f(sample)
        check_costs(costs, sample if not gates else sample.unsqueeze(-1))
        # A cost with parameters has a graph of its own. Compilers show none.
        if wants_gradient and not (requires_grad(costs) and (is_traced or depends_on(costs, sources))):
            raise without_derivative(", or an estimator that needs none such as gapped.RLOO(2)")
        return costs.mean(0)
    rows = simplex.computed(simplex.masked(logits, mask))
    if gates:
        rows, of_gates = simplex.pairs(rows), f
        f = lambda pairs: of_gates(pairs[..., 0])  # noqa: E731
    cost = Cost(f, simplex.shift(rows.detach()), logits.dtype, context)
    estimator.check(cost)
    value, gradient = estimator.estimate(cost, generator, is_differentiated(rows))
    if gradient is None:
        return value
    gradient = drop_absent(gradient, rows.detach())
    return with_gradient(value, rows, gradient, keep=estimator.remembers)
