"""Estimators whose sample carries the gradient, one file each; here is the base class that they share.

An estimator is a frozen dataclass with three methods, of which only the last must be written. `draw_category`
generates everything random: by default, one category per row from one uniform per row. `draw_given` generates
what is random besides a category that is given: by default, nothing. `points` is a pure function of the draw,
and returns the points of the simplex that carry the gradient. All get logits in float32 or float64, without a
graph, with the categories on the last axis and relative to the largest of their row, which is 0.
`Pathwise.sample` does the rest: masks, axes, dtypes, rows without a distribution, blocks of rows,
straight-through glue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from gapped import simplex, soft_lookup
from gapped.checks import (
    GATES,
    ROWS,
    check_fit,
    check_flag,
    check_generator,
    check_level,
    check_logits,
    check_mask,
    check_scores,
    in_eager_mode,
    is_known_finite,
)
from gapped.choice import Choice, fused_choice, plain_choice
from gapped.errors import reject
from gapped.gradient import (
    Points,
    Product,
    blocks,
    is_differentiated,
    needs_blocks,
    pair_slopes,
    with_gradient,
    with_points,
)
from gapped.kernels import backend
from gapped.kernels.sampling.fused import Fused, refusal
from gapped.linear import linear_choices
from gapped.linear.linear_choices import LinearChoice

Source = Literal["sample", "argmax"]
"""Where a category comes from: the softmax of the logits, or their argmax."""


class Draw(NamedTuple):
    """Everything random about a sample."""

    category: Tensor
    """The category of each row, `(*rows)`."""
    noise: Tensor | None = None
    """Further noise of the surrogate, in the estimator's own form."""


class Outcome(NamedTuple):
    """A sample of `(*rows, K)` logits that does not carry its gradient yet."""

    value: Tensor
    """The sample, in the dtype of the logits; empty unless requested."""
    category: Tensor
    """The category of each row: `K` if it has no category, `K + 1` if it holds a NaN or +inf."""
    gradient: Points | None
    """The points that carry the gradient, if one is wanted."""


@dataclass(frozen=True, eq=False)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient.

    `gapped.GST`, `gapped.GumbelSoftmax` and the others of this family are its subclasses. All have the
    arguments below, and the methods `sample`, `choose`, `mix`, `gate` and `choose_linear`.

    Arguments:
        tau: Temperature of the gradient: a positive number, or a tensor that broadcasts against the logits'
            shape without the category axis.
        hard: True for one-hot samples, False for the surrogate itself, a point of the simplex.
        draw: "sample" draws the category from the softmax of the logits; "argmax" takes the largest logit.
        backend: "torch", "triton", or "auto": Triton on a GPU where it can, else torch.
    """

    name: ClassVar[str]
    """What the registry, the command line and records call it."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be tensors, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""
    is_consistent: ClassVar[bool] = True
    """Whether the surrogate is largest at the drawn category (property 1 of the paper), by default."""
    learns_tau: ClassVar[bool] = False
    """Whether a temperature that requires a gradient gets one."""

    tau: float | Tensor = 1.0
    """Temperature of the surrogate: a positive number, or a tensor that broadcasts against the logits'
    shape without the category axis. A tensor with as many axes as the logits has that axis too, of size 1."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""
    draw: Source = field(default="sample", kw_only=True)
    """Where the category comes from: `"sample"` draws it from the softmax of the logits; `"argmax"` takes
    the largest logit, the first of equal ones. The gradient is the estimator's own for that category. Noise
    that its surrogate needs is drawn given that this category wins, so only the gradient is random then."""
    backend: str = field(default="auto", kw_only=True, repr=False)
    """Who computes: `"torch"`, `"triton"` (or an error where it cannot), or `"auto"`, which is Triton
    on CUDA where it can and torch elsewhere."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True, learned=self.learns_tau)
        check_flag("hard", self.hard)
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")
        if self.draw not in ("sample", "argmax"):
            raise reject("draw", self.draw, "'sample' or 'argmax'")
        if self.backend not in backend.BACKENDS:
            raise reject("backend", self.backend, f"one of {', '.join(backend.BACKENDS)}")

    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        Arguments:
            logits: Unnormalised log-probabilities, the categories on the axis `dim`.
            dim: The category axis.
            mask: Booleans that broadcast against the logits, with all of their axes where `dim` is not the
                last one. Categories where it is False do not exist.
            generator: Where random numbers come from; None is torch's default generator, the only one that
                torch.compile supports.

        Returns:
            The sample. Half precision is computed in float32 and rounded once, at the end.

        The generator's state after the call does not depend on whether a gradient is wanted. The sample may
        be changed in place, and so may the logits after it is drawn, except where a kernel draws it: kernels
        keep the logits and the temperatures for the backward pass, and autograd notices.
        """
        rows, is_last = self._masked(logits, dim, mask, generator), dim in (-1, logits.dim() - 1)
        if not is_last:
            rows = rows.movedim(dim, -1)
        fitted = self._fitted(logits, dim)
        kernel = fitted._backend_for(rows)
        if kernel is not None:
            from gapped.kernels.sampling import launch

            value = launch.sample(rows, kernel, generator)
        else:
            rows = rows if is_last else rows.contiguous()
            wants_gradient = is_differentiated(rows) or fitted.has_learned_tau()
            value = fitted.attach(rows, fitted.outcome(rows.detach(), generator, wants_gradient))
        return value if is_last else value.movedim(-1, dim)

    def __call__(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a sample: the method `sample` under another name."""
        return self.sample(logits, dim=dim, mask=mask, generator=generator)

    def choose(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Draw one category per row, by its index; no one-hot vector is written.

        Arguments:
            logits: Unnormalised log-probabilities, the categories on the axis `dim`.
            dim: The category axis.
            mask: Booleans that broadcast against the logits. Categories where it is False do not exist.
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            An object with `index`, of the shape of the logits without the category axis; `select(table)`,
            which looks entries up; and `gate()`, a 1 for each row. The last two carry the gradient.
        """
        self.check_choice()
        rows, fitted = self._masked(logits, dim, mask, generator), self._fitted(logits, dim)
        # A view less for autograd, where nothing moves.
        rows = rows if dim in (-1, rows.dim() - 1) else rows.movedim(dim, -1)
        kernel = fitted._backend_for(rows)
        wants_gradient = is_differentiated(rows)
        rows = rows if wants_gradient else rows.detach()
        if kernel is not None:
            return fused_choice(rows, kernel, generator)
        _, index, gradient = fitted.outcome(rows.detach(), generator, wants_gradient, dense=False)
        return plain_choice(rows, index, gradient)

    def mix(
        self,
        logits: Tensor,
        table: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A soft sample times a table, whatever `hard` is; the sample is never held.

        Value and gradients are those of `sample(logits) @ table` with `hard=False`. That needs three tensors
        of the size of the logits: the sample, its gradient, and the gradient of the logits. Here the last one
        is all: a block of rows is drawn, multiplied and dropped, and drawn again in the backward pass.

        Arguments:
            logits: Unnormalised log-probabilities, the categories on the axis `dim`.
            table: A tensor `(K, *rest)`, one table for all rows; or, for logits `(..., G, K)` whose group
                axis comes just before the categories, `(G, K, *rest)`, one for each group. It is read so if
                it has at least three axes, of which the first two are the last two of the logits.
            dim: The category axis.
            mask: Booleans that broadcast against the logits. Categories where it is False do not exist.
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            A tensor `(*rows, *rest)`: for each row the mean of the table's rows, weighted by the soft
            sample. Its dtype is that of the table, or what autocast says; the sample has that of the logits.

        The logits must not be changed before the backward pass, and autograd notices. GST in torch with
        `detach=False` or a gap function of your own must see all rows at once, and is not cut into blocks.
        torch.compile breaks the graph here; inside of function transforms such as vmap the sample is held.

        >>> import gapped
        >>> logits = torch.tensor([[0.0, 0.0], [99.0, 0.0]], requires_grad=True)
        >>> gapped.StraightThrough().mix(logits, torch.tensor([10.0, 20.0]))
        tensor([15., 10.], grad_fn=<ViewBackward0>)
        """
        if not self.has_surrogate:
            accepted = "one with soft samples; for hard ones there is choose(logits).select(table)"
            raise reject("estimator", type(self).__name__, accepted)
        check_logits(logits, dim)
        check_mask(mask, logits, dim)
        check_generator(generator, logits)
        fitted = (replace(self, hard=False) if self.hard else self)._fitted(logits, dim)
        if dim not in (-1, logits.dim() - 1):
            logits, mask = logits.movedim(dim, -1), None if mask is None else mask.movedim(dim, -1)
        is_fused = fitted._backend_for(logits) is not None
        return soft_lookup.mix(fitted, is_fused, logits, table, mask, generator)

    def gate(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw gates, Bernoulli samples of the shape and dtype of `logits`: see `gapped.gate`.

        Arguments:
            logits: Log-odds, of any shape. Options of the estimator that are tensors broadcast against it.
            mask: Booleans that broadcast against the logits; gates where it is False are 0.
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            A tensor of the shape and dtype of `logits`, of zeros and ones if the estimator is hard.
        """
        check_scores(logits)
        check_mask(mask, logits)
        check_generator(generator, logits)
        for name in self.levels:
            check_fit(name, getattr(self, name), logits.shape, GATES)
        odds = simplex.masked(logits, mask)
        if not self.has_plain_gradient():
            return self.sample(simplex.pairs(odds), generator=generator)[..., 0]
        kernel = self._gate_kernel(odds)
        backend.note("torch" if kernel is None else "triton")
        if kernel is not None:
            from gapped.kernels import gates

            return gates.gate(odds, kernel, generator)
        value, slopes = self._gates(odds.detach(), generator, is_differentiated(odds))
        return value if slopes is None else with_gradient(value, simplex.computed(odds), slopes)

    def _gate_kernel(self, odds: Tensor) -> Fused | None:
        """The arguments of the fused kernels if they draw these gates, else None."""
        where = "in compiled code" if torch.compiler.is_compiling() else "for their argmax"
        if not torch.compiler.is_compiling() and self.draw == "sample":
            return self.kernel(odds.unsqueeze(-1))
        if self.backend == "triton":
            raise reject("backend", "triton", f"torch or auto here: gates have no kernel {where}")
        return None

    def _gates(
        self, odds: Tensor, generator: torch.Generator | None, wants_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gates, and the slopes of their gradients if wanted: one number each, whatever the estimator."""
        if not (needs_blocks(odds, 2) and self.is_divisible()):
            value, _, gradient = self._block(simplex.pairs(odds), generator, wants_gradient, dense=True)
            return value[..., 0].contiguous(), None if gradient is None else pair_slopes(*gradient)
        flat, value = odds.reshape(-1), torch.empty(odds.shape, dtype=odds.dtype, device=odds.device)
        slopes = torch.empty_like(value, dtype=simplex.computed(flat[:0]).dtype) if wants_gradient else None
        for block, estimator in self._blocks(odds.shape, 2):
            value.view(-1)[block], own = estimator._gates(flat[block], generator, wants_gradient)
            if slopes is not None and own is not None:
                slopes.view(-1)[block] = own
        return value, slopes

    def choose_linear(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LinearChoice:
        """Draw one category per row by the logits `hidden @ weight.T + bias`, never held in memory.

        Arguments:
            hidden: Rows of `d` numbers, `(*rows, d)`.
            weight: One row for each of the `V` categories, `(V, d)`.
            bias: `(V)`, or None.
            mask: Booleans that broadcast to `(*rows, V)`; categories where it is False do not exist.
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            An object with `index`, `select`, `gate` and `log_prob`: see `gapped.linear_choice`.
        """
        self.check_choice()
        return linear_choices.choose(self, hidden, weight, bias, mask, generator)

    def check_choice(self) -> None:
        """Raise an error unless the samples can be given by their index."""
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        if self.has_learned_tau():
            raise reject(
                "tau", "a tensor that requires grad", "one without: choose and gst_index learn no temperature"
            )

    def _masked(
        self, logits: Tensor, dim: int, mask: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The logits, masked, once all arguments are checked."""
        check_logits(logits, dim)
        check_mask(mask, logits, dim)
        check_generator(generator, logits)
        return simplex.masked(logits, mask)

    def _fitted(self, logits: Tensor, dim: int) -> Self:
        """This estimator with levels that have as many axes as the logits, `dim` of size 1, without `dim`."""
        levels: dict[str, Any] = {}
        for name in self.levels:
            level = getattr(self, name)
            if isinstance(level, Tensor) and level.dim() == logits.dim() and level.shape[dim] == 1:
                levels[name] = level.squeeze(dim)
        return replace(self, **levels) if levels else self

    def _backend_for(self, rows: Tensor) -> Fused | None:
        """The kernel that computes, or None for torch, once options given as tensors are known to fit."""
        for name in self.levels:
            check_fit(name, getattr(self, name), rows.shape[:-1], ROWS)
        kernel = self.kernel(rows)
        backend.note("torch" if kernel is None else "triton")
        return kernel

    def outcome(
        self, rows: Tensor, generator: torch.Generator | None, wants_gradient: bool, *, dense: bool = True
    ) -> Outcome:
        """A sample of these rows; its index alone unless `dense`. Large inputs are computed in blocks."""
        if not (needs_blocks(rows) and self.is_divisible()):
            return self._block(rows, generator, wants_gradient, dense)
        shape, categories = rows.shape, rows.shape[-1]
        value = torch.empty(shape if dense else 0, dtype=rows.dtype, device=rows.device)
        index = torch.empty(shape[:-1], dtype=torch.int64, device=rows.device)
        points: Tensor | None = None
        product: Product | None = None
        weights: list[Any] = []
        matrix, values, indices = rows.reshape(-1, categories), value.view(-1, categories), index.view(-1)
        for block, estimator in self._blocks(shape[:-1], categories):
            own, indices[block], gradient = estimator._block(matrix[block], generator, wants_gradient, dense)
            if dense:
                values[block] = own
            if gradient is not None:
                if points is None:
                    points = gradient.points.new_empty((len(gradient.points), *matrix.shape))
                points[:, block] = gradient.points
                weights.append(gradient.weights)
                product = gradient.product
        if points is None:
            return Outcome(value, index, None)
        every = torch.cat(weights).view(*shape[:-1], 1) if isinstance(weights[0], Tensor) else weights[0]
        return Outcome(value, index, Points(points.view(-1, *shape), every, product))

    def _blocks(self, shape: torch.Size, numbers: int) -> Iterator[tuple[slice, Self]]:
        """Blocks of rows, `shape` in all and of so many `numbers` each, with the estimator of each block."""
        options = {name: getattr(self, name) for name in self.levels}
        levels: dict[str, Any] = {
            name: level.expand(shape).reshape(-1)
            for name, level in options.items()
            if isinstance(level, Tensor)
        }
        for block in blocks(shape.numel(), numbers):
            yield block, replace(self, **{name: level[block] for name, level in levels.items()})

    def _block(
        self, rows: Tensor, generator: torch.Generator | None, wants_gradient: bool, dense: bool
    ) -> Outcome:
        """A sample of these rows, all at once."""
        categories, logits = rows.shape[-1], simplex.computed(rows)
        top = logits.amax(-1, keepdim=True)
        logits = logits - top
        # Rows without categories, and those with a NaN or +inf, have no distribution. Where there may be
        # some, uniform rows replace them, so that estimators need not handle them.
        lawful = None if is_known_finite(top) else top.isfinite()
        if lawful is not None:
            logits = torch.where(lawful, logits, 0.0)
        surrogate = wants_gradient or not self.hard
        if self.draw == "argmax":
            draw = self.draw_given(logits, logits.argmax(-1), generator, surrogate)
        else:
            draw = self.draw_category(logits, generator, surrogate)
        index = draw.category
        if lawful is not None:
            outside = torch.where(top == -torch.inf, categories, categories + 1)
            index = torch.where(lawful, index.unsqueeze(-1), outside).squeeze(-1)
        gradient = None
        if surrogate:
            gradient = self.points(logits, draw)
            if lawful is not None:
                filling = torch.where(top == -torch.inf, 0.0, torch.nan)
                gradient = gradient._replace(points=torch.where(lawful, gradient.points, filling))
        if not self.hard:
            assert gradient is not None
            value = gradient.points.mean(0).to(rows.dtype)
        elif not dense:
            value = rows.new_empty(0)
        elif lawful is None:
            value = simplex.lawful_one_hot(index, rows)
        else:
            value = simplex.one_hot(index, categories, rows.dtype)
        if gradient is None or not wants_gradient:
            return Outcome(value, index, None)
        if not is_known_finite(rows):
            # Not a constant -0.0, which compilers take for 0.0.
            points = torch.where(rows.isneginf(), -gradient.points, gradient.points)
            gradient = gradient._replace(points=points)
        return Outcome(value, index, gradient)

    def kernel(self, rows: Tensor) -> Fused | None:
        """The arguments of the fused kernels if they compute these rows, else None."""
        if self.backend == "torch" or (self.backend == "auto" and not rows.is_cuda):
            return None
        fused = self._fused_draw() if torch.compiler.is_compiling() else self._fused
        why_not = refusal(rows, fused)
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"torch or auto here: {why_not}")
        return fused if why_not is None else None

    def fused(self) -> Fused | None:
        """The arguments of the fused kernels for this estimator's own draws; None if it has no kernel."""
        return None

    def _fused_draw(self) -> Fused | None:
        fused = self.fused()
        return fused if fused is None or self.draw == "sample" else fused.at_argmax()

    @cached_property
    def _fused(self) -> Fused | None:
        return self._fused_draw()

    def draw_category(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        """Draw a category per row, and, if `surrogate`, the noise that only the surrogate needs."""
        return self.draw_given(logits, simplex.inverse_cdf(logits.exp(), generator), generator, surrogate)

    def draw_given(
        self, logits: Tensor, category: Tensor, generator: torch.Generator | None, surrogate: bool
    ) -> Draw:
        """The draw whose category is given: if `surrogate`, with the noise that the surrogate needs."""
        return Draw(category)

    def law(self, logits: Tensor) -> tuple[Tensor, float | Tensor]:
        """The logits of the law that categories are drawn from, and their slope in the given ones."""
        return logits, 1.0

    @abstractmethod
    def points(self, logits: Tensor, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def has_learned_tau(self) -> bool:
        """Whether the temperature wants a gradient."""
        return isinstance(self.tau, Tensor) and is_differentiated(self.tau)

    def has_plain_gradient(self) -> bool:
        """Whether the gradient goes to the logits alone, and is given by the points."""
        return not self.has_learned_tau()

    def attach(self, rows: Tensor, outcome: Outcome) -> Tensor:
        """The sample `outcome` of `rows`, with its gradient if there is one."""
        value, index, gradient = outcome
        return value if gradient is None else with_points(value, self.carrier(rows, index), *gradient)

    def carrier(self, rows: Tensor, index: Tensor) -> Tensor:
        """The tensor that receives the gradient: the logits, in the graph, unless overridden."""
        return rows

    def is_divisible(self) -> bool:
        """Whether a block of rows may be computed without the others."""
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        options = (getattr(self, f.name) for f in fields(self))
        return hash((type(self), *(o.shape if isinstance(o, Tensor) else o for o in options)))


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b)


_P = TypeVar("_P", bound=Pathwise)
_PLAIN = frozenset({bool, int, float, str})


def cached_estimator(kind: type[_P], **options: Any) -> _P:
    """The estimator with these options; if all are plain values, it is built and checked only once."""
    # A compiler would have to trace the cache, and gains nothing from it.
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, options.values())):
        return kind(**options)
    return _cache(kind, **options)  # type: ignore[return-value]


@lru_cache(maxsize=256, typed=True)
def _cache(kind: type[Pathwise], **options: Any) -> Pathwise:
    return kind(**options)


def conditional_noise(
    log_p: Tensor, category: Tensor, samples: int, generator: torch.Generator | None, wanted: bool
) -> Tensor | None:
    """`simplex.conditional_gumbel` if `wanted`.

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
    return simplex.conditional_gumbel(log_p, category, samples, generator)


def divide(logits: Tensor, tau: float | Tensor) -> Tensor:
    """`logits` over a temperature that `per_row` returned; a no-op for 1."""
    return logits / tau if isinstance(tau, Tensor) or tau != 1 else logits


def per_row(level: float | Tensor, like: Tensor) -> float | Tensor:
    """A temperature or gap in a form that broadcasts against `(*rows, K)`.

    A negative entry, which only a tensor on a device can still hold, becomes NaN and so does its row.
    """
    if not isinstance(level, Tensor):
        return float(level)
    level = level.detach().to(device=like.device, dtype=like.dtype).unsqueeze(-1)
    return torch.where(level >= 0, level, torch.nan)
