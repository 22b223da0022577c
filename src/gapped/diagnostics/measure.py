"""Which estimator suits this cost, this model: bias and variance, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gapped.checks import check_count, check_generator, check_logits, check_mask
from gapped.diagnostics.cost import batch_axes_of
from gapped.diagnostics.diagnosis import Diagnosis, Row
from gapped.diagnostics.gradients import CostGradients, ModelGradients, Source
from gapped.diagnostics.intervals import Interval, mean_interval, norm_interval, normal_quantile
from gapped.diagnostics.moments import Moments
from gapped.diagnostics.reference import Coordinates, Reference
from gapped.diagnostics.stream import LEAST, GradientStream
from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.score import Score
from gapped.score.exact import LIMIT, Exact
from gapped.score.reinforce import RLOO

Progress = Callable[[str, int, int], None]
"""Told what is being measured, how many of its gradients are done, and how many there will be."""

# Numbers that the cost is given in one call, a group of gradients together: what stays in a cache.
_GROUP = 2**17
_LARGEST_GROUP = 512
# Enumerate up to so many numbers, sum coordinates up to so many per gradient.
_ENUMERATED, _SUMMED = 2**24, 2**22
_REFERENCES = ("auto", "exact", "coordinate", "rloo")


def diagnose(
    f: Callable[[Tensor], Tensor],
    logits: Tensor,
    estimators: Mapping[str, Pathwise | Score] | Iterable[Pathwise | Score],
    samples: int = 1000,
    reference: str | Tensor = "auto",
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence: float = 0.95,
    context: Tensor | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    r"""Measure bias, variance and cost of estimators of :math:`\nabla_\theta\,\mathbb{E} f(D)`.

    - `f`, `logits`, `mask`, `context`: as for `gapped.expectation`. With a batch, the gradient is that of all
      examples, each of its own cost.
    - `estimators`: objects of either family, or a mapping from labels to them.
    - `samples`: gradients drawn from each. Memory does not grow with it.
    - `reference`: ``"exact"``, enumeration; ``"coordinate"``, one variable summed out at a time, the others
      drawn, averaged over `samples` / 4 draws; ``"rloo"``, a long unbiased run; ``"auto"``, the first of them
      that is affordable; or the exact gradient itself, a tensor of the shape of `logits`. Where the reference
      has an error of its own, the intervals contain it.

    Estimators with parameters or a memory of their own are measured as they are, and do not change.
    The intervals are described in ``docs/diagnose.md``.

    >>> import gapped
    >>> logits, slope = torch.zeros(3, 4), torch.arange(4.0)
    >>> found = diagnose(lambda z: (z @ slope).sum(-1), logits, [gapped.StraightThrough(), gapped.GST()])
    >>> found["StraightThrough"].bias.high < 1e-5 < found["GST"].bias.low
    True
    """
    check_logits(logits)
    check_mask(mask, logits)
    check_generator(generator, logits)
    check_settings(samples, confidence)
    if not callable(f):
        raise reject("f", f"an object of type {type(f).__name__}", "a function from samples to costs")
    members = _labelled(estimators)
    for estimator in members.values():
        if not isinstance(estimator, Pathwise | Score):
            accepted = "estimators such as gapped.GST() or gapped.RLOO(2)"
            raise reject("estimators", f"an object of type {type(estimator).__name__}", accepted)
    logits = logits.detach()
    batch_axes = batch_axes_of(f, logits, mask)
    source = CostGradients(f, logits, mask, generator, context)
    target = _reference(source, reference, logits, batch_axes, samples, progress)
    eps = torch.finfo(logits.dtype).eps
    rows = []
    for label, estimator in members.items():
        count = LEAST if isinstance(estimator, Exact) else samples
        rows.append(_measure(source, label, estimator, count, target, confidence, eps, progress))
    return Diagnosis(tuple(rows), target.kind, target.norm(confidence), confidence)


def diagnose_model(
    loss_fn: Callable[[Any, torch.Generator | None], Tensor],
    parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    estimators: Mapping[str, Any] | Iterable[Any],
    samples: int = 100,
    reference: Any = None,
    *,
    generator: torch.Generator | None = None,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure the variance, and against a reference the bias, of the gradient of a model's parameters.

    - `loss_fn`: maps an estimator and a generator to a loss, one number. What else is random in it counts as
      noise of the gradient, so keep the data fixed.
    - `parameters`: those whose gradient is looked at: a module such as ``model.encoder``, its
      ``named_parameters()``, or tensors.
    - `reference`: an estimator to take as unbiased, such as `gapped.RLOO(8)`, averaged over four times
      `samples` gradients; without one, bias is not measured.

    Estimators with parameters or a memory of their own are in evaluation mode meanwhile and do not change, so
    `loss_fn` leaves their `variance_loss` out.

    `Row.mean_variance` is the variance of the gradient per weight, averaged over weights: the quantity of the
    paper's variance figure. `Row.per_parameter` has it for each parameter.

    >>> import gapped
    >>> encoder, x = torch.nn.Linear(3, 5), torch.ones(8, 3)
    >>> def loss(estimator, generator):
    ...     cost = lambda z: z[..., 0] ** 2
    ...     return gapped.expectation(cost, encoder(x), estimator, generator=generator).mean()
    >>> parameters = dict(encoder.named_parameters())
    >>> found = diagnose_model(loss, parameters, [gapped.GST(), gapped.RLOO(2)], samples=20)
    >>> sorted(found["GST"].per_parameter)
    ['bias', 'weight']
    """
    check_settings(samples, confidence)
    if not callable(loss_fn):
        accepted = "a function of an estimator and a generator"
        raise reject("loss_fn", f"an object of type {type(loss_fn).__name__}", accepted)
    named = _named(parameters)
    source = ModelGradients(loss_fn, named, generator)
    target = None
    if reference is not None:
        label = f"mean of {_label(reference)}"
        stream = GradientStream(source.size, source.device)
        for _ in _groups(source, stream, reference, 4 * samples, label, progress):
            pass
        target = Reference.of(f"{label}, {4 * samples:,} gradients", stream)
    eps = torch.finfo(next(iter(named.values())).dtype).eps
    rows = [
        _measure(source, label, estimator, samples, target, confidence, eps, progress, named)
        for label, estimator in _labelled(estimators).items()
    ]
    kind, norm = ("none", None) if target is None else (target.kind, target.norm(confidence))
    return Diagnosis(tuple(rows), kind, norm, confidence)


def _reference(
    source: CostGradients,
    reference: str | Tensor,
    logits: Tensor,
    batch_axes: int,
    samples: int,
    progress: Progress | None,
) -> Reference:
    if isinstance(reference, Tensor):
        if reference.shape != logits.shape or not reference.isfinite().all():
            accepted = f"a finite tensor of the logits' shape {tuple(logits.shape)}"
            raise reject("reference", f"a tensor of shape {tuple(reference.shape)}", accepted)
        return Reference("the gradient that was given", reference.detach().double().reshape(-1))
    if reference not in _REFERENCES:
        raise reject("reference", reference, f"one of {', '.join(_REFERENCES)}, or a tensor")
    if reference == "auto":
        reference = _affordable(logits, batch_axes)
    if reference == "exact":
        return Reference("exact, by enumeration", source.draw(Exact(), 1)[0].double())
    chosen: tuple[Score, int, str] = (RLOO(16), samples, "RLOO with 16 samples")
    if reference == "coordinate":
        chosen = (Coordinates(), max(samples // 4, 64), "one variable summed out at a time")
    estimator, count, name = chosen
    stream = GradientStream(source.size, source.device)
    for _ in _groups(source, stream, estimator, count, "reference", progress):
        pass
    return Reference.of(f"{name}, {count:,} gradients", stream)


def _affordable(logits: Tensor, batch_axes: int) -> str:
    categories = logits.shape[-1]
    variables = math.prod(logits.shape[batch_axes:-1])
    if variables * math.log(categories) <= math.log(LIMIT):
        combinations = categories**variables
        if combinations <= LIMIT and combinations * logits.numel() <= _ENUMERATED:
            return "exact"
    return "coordinate" if variables * categories * logits.numel() <= _SUMMED else "rloo"


def _groups(
    source: Source,
    stream: GradientStream,
    estimator: Any,
    samples: int,
    label: str,
    progress: Progress | None,
) -> Iterable[float]:
    """Draw `samples` gradients into `stream`, group by group; yields the seconds per gradient of each."""
    size = _group_size(source, estimator, samples)
    parts = max(samples // size, 1)
    done = 0
    for part in range(parts):
        count = samples * (part + 1) // parts - done
        _wait(source.device)
        began = time.perf_counter()
        group = source.draw(estimator, count)
        _wait(source.device)
        yield (time.perf_counter() - began) / count
        stream.add(group)
        done += count
        if progress is not None:
            progress(label, done, samples)


def _group_size(source: Source, estimator: Any, samples: int) -> int:
    """How many gradients to draw together: as many as fit, but several groups, which time is judged by."""
    cost = source.size
    if isinstance(source, CostGradients):
        before = source.evaluations
        source.draw(estimator, 1)
        cost *= source.evaluations - before
    return max(LEAST, min(_GROUP // max(cost, 1), _LARGEST_GROUP, samples // 8))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(
    source: Source,
    label: str,
    estimator: Any,
    samples: int,
    target: Reference | None,
    confidence: float,
    eps: float,
    progress: Progress | None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Row:
    stream = GradientStream(source.size, source.device, None if target is None else target.gradient)
    times, count = Moments(torch.zeros(())), 0
    evaluations = None
    for seconds in _groups(source, stream, estimator, samples, label, progress):
        times.add(torch.tensor(seconds, dtype=torch.float64))
        count += 1
    if isinstance(source, CostGradients):
        before = source.evaluations
        source.draw(estimator, 1)
        evaluations = float(source.evaluations - before)
    bias, relative, mse, cosine = errors_of(stream, target, confidence, eps)
    variance = stream.variance
    spread = mean_interval(variance, float(stream.distance.variance), stream.count, confidence)
    return Row(
        label=label,
        samples=stream.count,
        bias=bias,
        relative_bias=relative,
        variance=_not_negative(spread),
        mse=mse,
        cosine=cosine,
        evaluations=evaluations,
        seconds=_not_negative(mean_interval(float(times.mean), float(times.variance), count, confidence)),
        entries=source.size,
        per_parameter=_per_parameter(stream, parameters or {}),
        enumerates=isinstance(estimator, Exact),
    )


def errors_of(
    stream: GradientStream, target: Reference | None, confidence: float, eps: float
) -> tuple[Interval | None, Interval | None, Interval | None, Interval | None]:
    """Bias, relative bias, mean squared error and cosine, each with its interval."""
    if target is None:
        return None, None, None, None
    n, variance = stream.count, stream.variance
    square = float((stream.gradient.mean - target.gradient).square().sum())
    noise = variance / n + target.noise
    # Cauchy and Schwarz bound what the errors of estimator and reference have in common.
    overlap = (math.sqrt(max(float(stream.overlap.mean), 0.0)) / n + math.sqrt(target.overlap)) ** 2
    debiased = max(square - noise, 0.0)
    along = stream.along / n + math.sqrt(target.overlap)
    length = target.norm(confidence).value
    resolution = 16 * eps * (length + float(stream.gradient.mean.norm()))

    def bias_at(level: float) -> Interval:
        return norm_interval(square, noise, overlap, along, level, resolution)

    # Two limits enter a ratio: each gets half of the error unless the length is known exactly.
    level = confidence if target.samples == 0 else (1 + confidence) / 2
    relative = bias_at(level) / target.norm(level)
    z2 = normal_quantile(confidence) ** 2
    doubt = 4 * debiased * math.sqrt(target.overlap) + 2 * target.overlap
    own = mean_interval(float(stream.error.mean) - target.noise, float(stream.error.variance), n, confidence)
    mse = _not_negative(_widened(own, math.sqrt(z2 * doubt)))
    cosine = None
    if length > 0:
        own = mean_interval(
            float(stream.cosine.mean) / length, float(stream.cosine.variance) / length**2, n, confidence
        )
        wide = _widened(own, math.sqrt(z2 * math.sqrt(target.overlap)) / length)
        cosine = Interval(*(min(max(end, -1.0), 1.0) for end in (wide.value, wide.low, wide.high)))
    return bias_at(confidence), relative, mse, cosine


def _widened(interval: Interval, by: float) -> Interval:
    half = math.hypot(interval.high - interval.value, by)
    return Interval(interval.value, interval.value - half, interval.value + half)


def _not_negative(interval: Interval) -> Interval:
    return Interval(max(interval.value, 0.0), max(interval.low, 0.0), max(interval.high, 0.0))


def _per_parameter(stream: GradientStream, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    sizes = [each.numel() for each in parameters.values()]
    pieces = torch.split(stream.gradient.variance, sizes) if sizes else ()
    return {name: float(piece.mean()) for name, piece in zip(parameters, pieces, strict=True)}


def check_settings(samples: object, confidence: object = 0.95) -> None:
    """Check what both functions are told of accuracy."""
    check_count("samples", samples, 2 * LEAST)
    if isinstance(confidence, bool) or not isinstance(confidence, float) or not 0.5 <= confidence < 1:
        raise reject("confidence", confidence, "a number from 0.5 to below 1, such as 0.95")


def _named(
    parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
) -> dict[str, Tensor]:
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    given = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    named = dict(each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(given))
    for name, each in named.items():
        if not isinstance(each, Tensor) or not each.requires_grad:
            raise reject("parameters", f"{name!r}, which requires no gradient", "tensors that require one")
    if not sum(each.numel() for each in named.values()):
        raise reject("parameters", "none", "at least one tensor")
    return named


def _labelled(estimators: Any) -> dict[str, Any]:
    """Estimators by label; equal labels get numbers."""
    accepted = "objects such as [gapped.GST(), gapped.RLOO(2)], or a mapping from labels to them"
    if isinstance(estimators, str) or not isinstance(estimators, Iterable):
        raise reject("estimators", estimators, accepted)
    if isinstance(estimators, Mapping):
        found = {str(label): estimator for label, estimator in estimators.items()}
    else:
        found = {}
        for estimator in estimators:
            label = base = _label(estimator)
            number = 2
            while label in found:
                label, number = f"{base} #{number}", number + 1
            found[label] = estimator
    if not found:
        raise reject("estimators", "none", accepted)
    return found


def _label(estimator: Any) -> str:
    """The class and the options that are not its defaults.

    >>> import gapped
    >>> _label(gapped.GST(tau=0.5)), _label(gapped.REBAR())
    ('GST(tau=0.5)', 'REBAR')
    """
    name = type(estimator).__name__
    if not is_dataclass(estimator):
        return name
    options = []
    for each in fields(estimator):
        value = getattr(estimator, each.name)
        if isinstance(value, Tensor):
            value = f"tensor of shape {tuple(value.shape)}"
        elif value == each.default:
            continue
        options.append(f"{each.name}={getattr(value, '__name__', value)}")
    return f"{name}({', '.join(options)})" if options else name
