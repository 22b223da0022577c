"""Bias, variance and cost of estimators, measured on a cost or on a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gapped.checks import check_count, check_generator, check_logits, check_mask
from gapped.diagnostics.diagnosis import Diagnosis, Row
from gapped.diagnostics.gradients import (
    CostGradients,
    ModelGradients,
    Progress,
    Reference,
    Source,
    collect,
    reference_of,
)
from gapped.diagnostics.moments import LEAST, mean_interval
from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.registry import label_estimators, label_of, resolve
from gapped.score import Score
from gapped.score.exact import Exact
from gapped.score.trainable import Trainable

LEAST_SAMPLES = 200
"""The fewest gradients whose 95% intervals held in 93% of trials and more; with 16 some held in 83%."""


def diagnose(
    f: Callable[[Tensor], Tensor],
    logits: Tensor,
    estimators: Mapping[str, Pathwise | Score | str] | Iterable[Pathwise | Score | str],
    samples: int = 1000,
    reference: str | Tensor = "auto",
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence: float = 0.95,
    context: Tensor | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure bias, variance and cost of estimators of the gradient of E f(D).

    Arguments:
        f: The cost: a function that maps one-hot tensors `(n, *batch, *variables, K)` to costs `(n, *batch)`,
            as for `gapped.expectation`.
        logits: `(*batch, *variables, K)`. With a batch, the gradient is that of the sum of all examples'
            costs.
        estimators: Objects of either family or their texts, or a mapping from labels to them.
        samples: Gradients drawn from each, at least 200. Memory does not grow with it.
        reference: "exact", enumeration; "coordinate", one variable summed out at a time, the others drawn,
            averaged over `samples` / 4 draws; "double-cv" or "rloo", a long unbiased run with or without the
            slopes of the cost; "auto", the first of them that is affordable and possible; or the exact
            gradient itself, a tensor of the shape of `logits`. The intervals account for the error of an
            estimated reference.
        mask: Booleans that broadcast against the logits; categories where it is False do not exist.
        generator: Where random numbers come from; None is one of its own, seeded out of torch's default one.
        confidence: The level of the intervals.
        context: The input of a learned baseline, for `gapped.NVIL` alone.
        progress: A function that is called with a label, how many gradients are done, and of how many.

    Returns:
        A `gapped.Diagnosis`, which prints as a table. `result["gst"]` is the row of an estimator, with
        `bias`, `variance`, `mse`, `cosine` and others, each with an interval.

    Estimators with parameters or a running baseline are measured as they are, and do not change. The
    intervals are described in docs/intervals.md.

    >>> logits, slope = torch.zeros(3, 4), torch.arange(4.0)
    >>> table = diagnose(lambda z: (z @ slope).sum(-1), logits, ["straight-through", "gst"])
    >>> table["straight-through"].bias.high < 1e-5 < table["gst"].bias.low
    True
    """
    check_logits(logits)
    check_mask(mask, logits)
    check_generator(generator, logits)
    check_settings(samples, confidence)
    if not callable(f):
        raise reject("f", f"an object of type {type(f).__name__}", "a function from samples to costs")
    members = {label: resolve(each) for label, each in label_estimators(estimators).items()}
    source = CostGradients(f, logits, mask, generator, context)
    target = reference_of(source, reference, samples, progress)
    return _diagnosis(source, members, samples, target, confidence, progress)


def diagnose_model(
    loss_fn: Callable[[Any, torch.Generator | None], Tensor],
    parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    estimators: Mapping[str, Any] | Iterable[Any],
    samples: int = 200,
    reference: Any = None,
    *,
    generator: torch.Generator | None = None,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure variance and bias of the gradient of a model's parameters.

    Arguments:
        loss_fn: Maps an estimator and a generator to a loss, one number. Any other randomness in it counts as
            noise of the gradient, so keep the data fixed. Seeding torch's generator in it makes all gradients
            of an estimator equal that does not draw from the given one.
        parameters: The gradient is with respect to them: a module such as `model.encoder`, its
            `named_parameters()`, or tensors.
        estimators: `loss_fn` is given each in turn; or a mapping from labels to them. A text becomes the
            estimator that it names.
        samples: Gradients drawn from each estimator, at least 200.
        reference: An estimator to take as unbiased, such as `gapped.RLOO(8)`, averaged over four times
            `samples` gradients; without one, bias is not measured.
        generator: Where random numbers come from; None is one of its own, seeded out of torch's default one.
        confidence: The level of the intervals.
        progress: A function that is called with a label, how many gradients are done, and of how many.

    Returns:
        A `gapped.Diagnosis`, which prints as a table. `mean_variance` of a row is the variance of the
        gradient per weight, averaged over weights: the quantity in the paper's variance figure.
        `per_parameter` has it for each parameter.

    Estimators with parameters or a running baseline are put into evaluation mode and do not change, so
    `loss_fn` should not add their `variance_loss`. Layers of the model are in the mode that they are in: the
    running means of a batch normalisation in training mode change.

    >>> import gapped
    >>> encoder, x = torch.nn.Linear(3, 5), torch.ones(8, 3)
    >>> def loss(estimator, generator):
    ...     cost = lambda z: z[..., 0] ** 2
    ...     return gapped.expectation(cost, encoder(x), estimator, generator=generator).mean()
    >>> parameters = dict(encoder.named_parameters())
    >>> table = diagnose_model(loss, parameters, [gapped.GST(), gapped.RLOO(2)])
    >>> sorted(table["GST"].per_parameter)
    ['bias', 'weight']
    """
    check_settings(samples, confidence)
    if not callable(loss_fn):
        accepted = "a function of an estimator and a generator"
        raise reject("loss_fn", f"an object of type {type(loss_fn).__name__}", accepted)
    source = ModelGradients(loss_fn, _name(parameters), generator)

    def read(estimator: Any) -> Any:
        """The estimator that a text names; anything else is for the user's own function to understand."""
        return resolve(estimator) if isinstance(estimator, str) else estimator

    target = None
    if reference is not None:
        name = f"mean of {label_of(reference)}"
        target = Reference.of(name, collect(source, read(reference), 4 * samples, name, progress)[0])
    members = {label: read(each) for label, each in label_estimators(estimators).items()}
    return _diagnosis(source, members, samples, target, confidence, progress)


def _diagnosis(
    source: Source,
    estimators: Mapping[str, Any],
    samples: int,
    target: Reference | None,
    confidence: float,
    progress: Progress | None,
) -> Diagnosis:
    rows = []
    for label, estimator in estimators.items():
        # An enumeration has no variance, unless something else in a model's loss is random.
        is_constant = isinstance(estimator, Exact) and isinstance(source, CostGradients)
        count = LEAST if is_constant else samples
        gradient = None if target is None else target.gradient
        stream, seconds = collect(source, estimator, count, label, progress, gradient)
        time = mean_interval(float(seconds.mean), float(seconds.variance), int(seconds.count), confidence)
        variance = mean_interval(stream.variance, float(stream.distance.variance), count, confidence)
        sizes = [each.numel() for each in source.parameters.values()] or [source.size]
        pieces = zip(source.parameters, torch.split(stream.gradient.variance, sizes), strict=False)
        rows.append(
            Row(
                label=label,
                samples=count,
                variance=variance.clamp(0.0),
                evaluations=source.evaluations(estimator),
                seconds=time.clamp(0.0),
                entries=source.size,
                per_parameter={name: float(piece.mean()) for name, piece in pieces},
                enumerates=isinstance(estimator, Exact),
                trainable=isinstance(estimator, Trainable) and any(True for _ in estimator.parameters()),
                **({} if target is None else target.errors_of(stream, confidence, source.eps)),
            )
        )
    if target is None:
        return Diagnosis(tuple(rows), "none", None, confidence)
    return Diagnosis(tuple(rows), target.kind, target.norm(confidence), confidence)


def check_settings(samples: object, confidence: object = 0.95) -> None:
    """Check the accuracy that both functions are asked for."""
    check_count("samples", samples, LEAST_SAMPLES)
    if isinstance(confidence, bool) or not isinstance(confidence, float) or not 0.5 <= confidence < 1:
        raise reject("confidence", confidence, "a number from 0.5 to below 1, such as 0.95")


def _name(
    parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
) -> dict[str, Tensor]:
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    entries = parameters.items() if isinstance(parameters, Mapping) else parameters
    tensors = dict(each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(entries))
    for name, each in tensors.items():
        if not isinstance(each, Tensor) or not each.requires_grad:
            raise reject("parameters", f"{name!r}, which requires no gradient", "tensors that require one")
    if not sum(each.numel() for each in tensors.values()):
        raise reject("parameters", "none", "at least one tensor")
    return tensors
