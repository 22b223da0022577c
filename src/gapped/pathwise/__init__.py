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

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import (
    ROWS,
    check_fit,
    check_flag,
    check_generator,
    check_level,
    check_logits,
    check_mask,
    is_known_finite,
    note_backend,
)
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import Points, Product, is_differentiated, pull_points, with_points, with_pull
from gapped.kernels import backend
from gapped.kernels.sampling.fused import Fused, refusal
from gapped.simplex import Draw as Draw

if TYPE_CHECKING:
    from gapped.choice import Choice
    from gapped.vocabulary import LinearChoice

Source = Literal["sample", "argmax"]
"""Where a category comes from: the softmax of the logits, or their argmax."""


class Outcome(NamedTuple):
    """A sample of `(*rows, K)` logits that does not carry its gradient yet."""

    value: Tensor
    """The sample, in the dtype of the logits; empty unless requested."""
    category: Tensor
    """The category of each row: `K` if it has no category, `K + 1` if it holds a NaN or +inf."""
    gradient: Points | None
    """The points that carry the gradient, if one is wanted."""


@documented
@dataclass(frozen=True, eq=False)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient.

    `gapped.GST`, `gapped.GumbelSoftmax` and the others of this family are its subclasses. All have the
    arguments below, and the methods `sample`, `choose`, `mix`, `gate` and `choose_linear`.

    A temperature with as many axes as the logits has their category axis too, of size 1. With "argmax" equal
    logits give the first of them, and noise that the surrogate needs is drawn given that this category wins:
    only the gradient is random then.
    """

    name: ClassVar[str]
    """Its name in the registry, on the command line and in records."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be tensors, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""
    is_consistent: ClassVar[bool] = True
    """Whether the surrogate is largest at the drawn category (property 1 of the paper), by default."""
    has_gate_kernel: ClassVar[bool] = True
    """Whether the kernels of gates know it, if it has kernels at all."""
    learns_tau: ClassVar[bool] = False
    """Whether a temperature that requires a gradient gets one."""

    tau: float | Tensor = 1.0
    hard: bool = True
    draw: Source = field(default="sample", kw_only=True)
    backend: str = field(default="auto", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True, learned=self.learns_tau)
        check_flag("hard", self.hard)
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")
        if self.draw not in ("sample", "argmax"):
            raise reject("draw", self.draw, "'sample' or 'argmax'")
        if self.backend not in backend.BACKENDS:
            raise reject("backend", self.backend, f"one of {', '.join(backend.BACKENDS)}")

    @documented
    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        Returns:
            The sample. Half precision is computed in float32 and rounded once, at the end.

        The generator's state after the call does not depend on whether a gradient is wanted. The sample may
        be changed in place, and so may the logits after it is drawn, except where a kernel draws it: kernels
        keep the logits and the temperatures for the backward pass, and autograd notices.
        """
        if mask is None and dim == -1 and simplex.is_plain(logits) and self._is_repeatable:
            check_generator(generator, logits)
            value = self._sample_of_finite(logits, generator)
            if value is not None:
                return value
        rows, fitted = self.prepare(logits, dim, mask, generator)
        is_last = dim in (-1, logits.dim() - 1)
        kernel = fitted.kernel(rows)
        if kernel is not None:
            from gapped.kernels.sampling import launch

            value = launch.sample(rows, kernel, generator)
        else:
            value = fitted.sample_in_torch(rows if is_last else rows.contiguous(), generator)
        return value if is_last else value.movedim(-1, dim)

    __call__ = sample

    @documented
    def choose(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Choice:
        """Draw one category per row, by its index; no one-hot vector is written.

        Returns:
            An object with `index`, of the shape of the logits without the category axis; `select(table)`,
            which looks entries up; and `gate()`, a 1 for each row. The last two carry the gradient.
        """
        from gapped.choice import choose

        return choose(self, logits, dim, mask, generator)

    @documented
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
            table: A tensor `(K, *rest)`, one table for all rows; or, for logits `(..., G, K)` whose group
                axis comes just before the categories, `(G, K, *rest)`, one for each group. It is read so if
                it has at least three axes, of which the first two are the last two of the logits.

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
        from gapped.vocabulary.mix import mix

        return mix(self, logits, table, dim, mask, generator)

    @documented
    def gate(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw gates, Bernoulli samples of the shape and dtype of `logits`: see `gapped.gate`.

        Arguments:
            logits: Log-odds, of any shape. Options of the estimator that are tensors broadcast against it.
            mask: Booleans that broadcast against the logits; gates where it is False are 0.

        Returns:
            A tensor of the shape and dtype of `logits`, of zeros and ones if the estimator is hard.
        """
        from gapped.gates import draw

        return draw(self, logits, mask, generator)

    @documented
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
            mask: Booleans that broadcast to `(*rows, V)`; categories where it is False do not exist.

        Returns:
            An object with `index`, `select`, `gate` and `log_prob`: see `gapped.linear_choice`.
        """
        from gapped.vocabulary import linear_choice

        return linear_choice(hidden, weight, bias, estimator=self, mask=mask, generator=generator)

    def check_choice(self) -> None:
        """Raise an error unless the samples can be given by their index."""
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        if self.has_learned_tau():
            raise reject("tau", "a tensor that requires grad", "one without: choices learn no temperature")

    def prepare(
        self, logits: Tensor, dim: int, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Self]:
        """The masked logits `(*rows, K)`, and this estimator with levels that broadcast against `rows`.

        All arguments of `sample` are checked. A level with as many axes as the logits, `dim` of size 1, loses
        that axis.
        """
        check_logits(logits, dim)
        check_mask(mask, logits, dim)
        check_generator(generator, logits)
        levels: dict[str, Any] = {}
        for name in self.levels:
            level = getattr(self, name)
            if isinstance(level, Tensor) and level.dim() == logits.dim() and level.shape[dim] == 1:
                levels[name] = level.squeeze(dim)
        fitted, rows = replace(self, **levels) if levels else self, simplex.masked(logits, mask)
        # Where nothing moves, autograd is spared a view.
        rows = rows if dim in (-1, rows.dim() - 1) else rows.movedim(dim, -1)
        for name in self.levels:
            check_fit(name, getattr(fitted, name), rows.shape[:-1], ROWS)
        return rows, fitted

    def sample_in_torch(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """The sample of masked logits `(*rows, K)`, with its gradient."""
        wants_gradient = is_differentiated(rows) or self.has_learned_tau()
        outcome = self.outcome(rows.detach(), generator, wants_gradient)
        return outcome.value if outcome.gradient is None else self.attach(rows, outcome)

    def _sample_of_finite(self, rows: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """The sample of finite logits; None if some are not finite, or if many need noise.

        It is that of `outcome`, in fewer operations. The points of a hard one are left to the backward pass.
        """
        is_large = rows.numel() > simplex.BLOCK
        if is_large and not (self.hard and self.draws_category_alone()):
            return None
        wants_gradient = is_differentiated(rows)
        logits = rows.detach() if wants_gradient else rows
        logits = logits - logits.amax(-1, keepdim=True)
        if not math.isfinite(logits.sum()):
            return None
        note_backend("torch")
        if is_large:
            category = torch.empty(rows.shape[:-1], dtype=torch.int64, device="cpu")
            matrix, indices = logits.reshape(-1, rows.shape[-1]), category.view(-1)
            for block in simplex.blocks(*matrix.shape):
                indices[block] = self._draw(matrix[block], generator, False).category
            draw = Draw(category)
        else:
            draw = self._draw(logits, generator, wants_gradient or not self.hard)
        if not self.hard:
            gradient = self.points(logits, draw)
            value = gradient.points.mean(0)
            return with_points(value, rows, *gradient) if wants_gradient else value
        value = simplex.lawful_one_hot(draw.category, rows)
        if not wants_gradient:
            return value
        return with_pull(value, rows, self._pull_draw, logits, draw.category, draw.noise)

    def _pull_draw(
        self, grad: Tensor, like: Tensor, logits: Tensor, category: Tensor, noise: Tensor | None
    ) -> Tensor:
        grad = grad.to(logits.dtype)
        if not simplex.needs_blocks(logits):
            return self.pull(grad, logits, Draw(category, noise)).to(like.dtype)
        result = torch.empty(grad.shape, dtype=like.dtype, device=grad.device)
        rows = result.view(-1, grad.shape[-1])
        grad, logits, category = grad.reshape(rows.shape), logits.reshape(rows.shape), category.view(-1)
        for block in simplex.blocks(*rows.shape):
            rows[block] = self.pull(grad[block], logits[block], Draw(category[block]))
        return result

    @classmethod
    def draws_category_alone(cls) -> bool:
        """Whether the gradient follows from the drawn category, without further noise."""
        return (cls.draw_given, cls.draw_category) == (Pathwise.draw_given, Pathwise.draw_category)

    def pull(self, grad: Tensor, logits: Tensor, draw: Draw) -> Tensor:
        """The gradient of finite logits for `grad` at the hard sample of `draw`, by its points."""
        return pull_points(grad, *self.points(logits, draw))

    @cached_property
    def _is_repeatable(self) -> bool:
        """Whether torch computes the points of a draw, and the same ones in the backward pass."""
        return not self.tensors and self.is_rowwise() and self.backend != "triton"

    def outcome(
        self,
        rows: Tensor,
        generator: torch.Generator | None,
        wants_gradient: bool,
        *,
        dense: bool = True,
        given: Tensor | None = None,
    ) -> Outcome:
        """A sample of these rows; its index alone unless `dense`. Large inputs are computed in blocks.

        With the `given` categories, which the generator has drawn before from logits that may have been
        rounded otherwise.
        """
        if not (simplex.needs_blocks(rows) and self.is_rowwise()):
            return self._block(rows, generator, wants_gradient, dense, given)
        shape, categories = rows.shape, rows.shape[-1]
        value = torch.empty(shape if dense else 0, dtype=rows.dtype, device=rows.device)
        index = torch.empty(shape[:-1], dtype=torch.int64, device=rows.device)
        points: Tensor | None = None
        product: Product | None = None
        weights: list[Any] = []
        matrix, values, indices = rows.reshape(-1, categories), value.view(-1, categories), index.view(-1)
        for block in simplex.blocks(len(matrix), categories):
            estimator = self.of_rows(shape[:-1], block)
            known = None if given is None else given[block]
            own, indices[block], gradient = estimator._block(
                matrix[block], generator, wants_gradient, dense, known
            )
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

    def of_rows(self, shape: torch.Size, rows: slice) -> Self:
        """This estimator with the levels of some rows, `shape` in all and counted in order."""
        levels: dict[str, Any] = {
            name: simplex.row_entries(level, shape, rows)
            for name in self.levels
            if isinstance(level := getattr(self, name), Tensor)
        }
        return replace(self, **levels) if levels else self

    def _block(
        self,
        rows: Tensor,
        generator: torch.Generator | None,
        wants_gradient: bool,
        dense: bool,
        given: Tensor | None = None,
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
        draw = self._draw(logits, generator, surrogate, given)
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

    def _draw(
        self,
        logits: Tensor,
        generator: torch.Generator | None,
        surrogate: bool,
        given: Tensor | None = None,
    ) -> Draw:
        if given is not None:
            given = torch.where(given < logits.shape[-1], given, 0)
        if self.draw == "argmax":
            return self.draw_given(
                logits, logits.argmax(-1) if given is None else given, generator, surrogate
            )
        if given is None:
            return self.draw_category(logits, generator, surrogate)
        if type(self).draw_category is Pathwise.draw_category:
            simplex.uniform(given.shape, simplex.accumulated(logits[..., 0]), generator)
            return self.draw_given(logits, given, generator, surrogate)
        draw = self.draw_category(logits, generator, surrogate)
        moved = (draw.category != given).unsqueeze(-1)
        if draw.noise is None or not moved.any():
            return draw
        other = self.draw_given(logits, given, generator, surrogate).noise
        assert other is not None
        return Draw(given, torch.where(moved, other, draw.noise))

    def kernel(self, rows: Tensor) -> Fused | None:
        """The arguments of the fused kernels if they compute these rows, else None; `backend_used` tells."""
        if self.backend == "torch" or (self.backend == "auto" and not rows.is_cuda):
            note_backend("torch")
            return None
        fused = self._fused_draw() if torch.compiler.is_compiling() else self._fused
        why_not = refusal(rows, fused)
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"torch or auto here: {why_not}")
        note_backend("torch" if why_not else "triton")
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

    def gate_slopes(self, lead: Tensor) -> Tensor:
        """The slopes of hard gates in their log-odds, in closed form, of classes that define it.

        `lead`, `(*gates, 1)`, has the log-odds of the value that each gate has against the other one. The
        result has the same shape: 0 for an infinite lead, NaN for NaN. Where a class does not define it, the
        points of pairs give the slopes.
        """
        raise NotImplementedError

    @abstractmethod
    def points(self, logits: Tensor, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def has_learned_tau(self) -> bool:
        """Whether the temperature wants a gradient."""
        return isinstance(self.tau, Tensor) and is_differentiated(self.tau)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The levels that are tensors."""
        levels = (getattr(self, name) for name in self.levels)
        return tuple(level for level in levels if isinstance(level, Tensor))

    def is_rowwise(self) -> bool:
        """Whether some rows may be drawn and differentiated without the others, through their points."""
        return True

    def attach(self, rows: Tensor, outcome: Outcome) -> Tensor:
        """The sample `outcome` of `rows`, with the gradient that its points give."""
        assert outcome.gradient is not None
        return with_points(outcome.value, rows, *outcome.gradient)

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


def resolve_pathwise(estimator: Pathwise | str | None) -> Pathwise:
    """The object that an argument called `estimator` stands for, where a sample is drawn.

    Text is read as `gapped.estimator` reads it, and None is the default.
    """
    # Reading text takes longer than drawing a few samples. A compiler would have to trace the cache.
    if (estimator is None or isinstance(estimator, str)) and not torch.compiler.is_compiling():
        return _cached_default_or_text(estimator)
    return estimator if isinstance(estimator, Pathwise) else _default_or_text(estimator)


def _default_or_text(estimator: Any) -> Pathwise:
    if estimator is None:
        from gapped.pathwise.gapmax import GapMax

        return GapMax()
    from gapped.registry import resolve

    resolved = resolve(estimator)
    if not isinstance(resolved, Pathwise):
        accepted = (
            "a pathwise estimator such as gapped.GapMax() or 'gapmax'; others go into gapped.expectation"
        )
        raise reject("estimator", estimator, accepted)
    return resolved


_cached_default_or_text = lru_cache(maxsize=256)(_default_or_text)
