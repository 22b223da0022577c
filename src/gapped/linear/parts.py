"""What is done with a chunk of logits: how a category is drawn, and how gradients take the logits' place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.gradient import jacobian_product
from gapped.kernels import backend
from gapped.kernels.sampling.fused import Fused
from gapped.linear.chunk_sizes import of_rows


class Chunk(NamedTuple):
    """Some rows, and what belongs to them."""

    rows: slice
    logits: Tensor
    estimator: Any
    """The estimator with the temperatures of these rows."""
    key: Tensor
    """What their noise is drawn from."""
    first: int
    """The number of the first row among those that share the key."""


class Draws(NamedTuple):
    """What is known of rows once their categories are drawn: a few numbers per row."""

    category: Tensor
    """The category: `V` in a row that has none, `V + 1` in one that holds a NaN or +inf."""
    law: Tensor | None
    """The logarithms of the category's probability, and of the sum of exponentials that the law is normalised
    by, ``(rows, 2)``; None while nobody asks for them."""
    stats: Tensor | None
    """What the kernels of long rows keep, ``(rows, 2)``; None where they do not draw."""

    def of(self, rows: slice) -> Draws:
        """Those of some rows."""
        return Draws(*(None if each is None else of_rows(each, rows) for each in self))  # type: ignore[arg-type]


class Whole:
    """The categories of a vocabulary that is all here: how to draw one, and what rows are reduced with."""

    first = 0
    """The number of the first category here."""

    def __init__(self, here: int) -> None:
        self.here = here
        """How many categories are here."""
        self.categories = here
        """How many there are."""
        self.largest = here
        """How many the largest part has: what all parts must agree on follows from it."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def highest(self, values: Tensor) -> Tensor:
        """The maximum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def agreed(self, keys: Tensor) -> Tensor:
        """Keys that all parts of the vocabulary share, which may overwrite `keys`."""
        return keys

    def kernel(self, estimator: Any, logits: Tensor) -> Fused | None:
        """The arguments of the kernels if they compute these rows, else None."""
        kernel: Fused | None = estimator.kernel(logits)
        return kernel

    def draw(self, chunk: Chunk, draws: Draws) -> None:
        """Draw the categories of a chunk, and write what is known of its rows to `draws`."""
        kernel = self.kernel(chunk.estimator, chunk.logits)
        backend.note("torch" if kernel is None else "triton")
        if kernel is not None and draws.stats is not None:
            from gapped.kernels.sampling import launch

            to = launch.Streamed(draws.category, draws.stats, draws.law)
            launch.stream(chunk.logits, chunk.key, kernel, to, first=chunk.first)
            return
        if kernel is not None:
            from gapped.kernels.sampling import launch

            launch.forward(chunk.logits, chunk.key, kernel, dense=False, indices=draws.category)
        else:
            draws.category.copy_(self.index(chunk.estimator, chunk.logits, chunk.key))
        if draws.law is not None:
            self.write_law(chunk, draws.category, draws.law)

    def write_law(self, chunk: Chunk, index: Tensor, to: Tensor) -> None:
        """Write the law of the categories that were drawn from a chunk: see `Draws`."""
        law, _ = chunk.estimator.law(simplex.computed(chunk.logits))
        log_sum = self.log_partition(law)
        selected = law.gather(-1, self.place(index).unsqueeze(-1)).squeeze(-1)
        log_prob = self.total(self.own(selected, index)) - log_sum
        to[:, 0] = torch.where(index == self.categories, 0.0, log_prob)
        to[:, 1] = log_sum

    def index(self, estimator: Any, logits: Tensor, key: Tensor) -> Tensor:
        """The category of each row, drawn by torch with noise from `key`."""
        index: Tensor = estimator.outcome(logits, seeded(key), False, dense=False).category
        return index

    def pull(self, chunk: Chunk, draws: Draws, grad: Tensor, at_index: bool = False) -> None:
        """Write the gradient of the logits in their place, by that of the one-hot sample.

        It is dense or, with `at_index`, given for the selected entries only.
        """
        kernel = self.kernel(chunk.estimator, chunk.logits)
        if kernel is not None:
            from gapped.kernels.sampling import launch

            how: dict[str, Any] = {"at_index": at_index}
            if draws.stats is not None:
                how |= {"out": chunk.logits, "first": chunk.first}
            drawn = (draws.category, draws.stats, chunk.key, grad, kernel)
            gradient = launch.backward(chunk.logits, *drawn, **how)
        else:
            dense = self.at_index(grad, draws.category, chunk.logits) if at_index else grad
            gradient = self.gradient(chunk.estimator, chunk.logits, chunk.key, draws.category, dense)
        if gradient is not chunk.logits:
            chunk.logits.copy_(gradient)

    def gradient(self, estimator: Any, logits: Tensor, key: Tensor, index: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the logits, computed by torch."""
        points, weights, product = estimator.outcome(logits, seeded(key), True, dense=False).gradient
        return jacobian_product(grad, points, weights, logits, product)

    def pull_log_prob(self, chunk: Chunk, draws: Draws, grad: Tensor) -> None:
        """Write the gradient of the logits in their place, by that of the log-probabilities.

        d log p(i) = e_i - p, in rows that have a category.
        """
        assert draws.law is not None
        kernel = self.kernel(chunk.estimator, chunk.logits)
        if kernel is not None and draws.stats is not None:
            from gapped.kernels.sampling import launch

            drawn = launch.Streamed(draws.category, draws.stats, draws.law)
            launch.pull_log_prob(chunk.logits, drawn, grad, kernel)
            return
        law, slope = chunk.estimator.law(simplex.computed(chunk.logits))
        grad = torch.where(draws.category == self.categories, 0.0, grad)
        p = torch.where(law == -torch.inf, 0.0, (law - draws.law[:, 1:]).exp_())
        gradient = self.at_index(grad, draws.category, law).addcmul_(p, grad.unsqueeze(-1), value=-1)
        chunk.logits.copy_(gradient.mul_(slope))

    def place(self, index: Tensor) -> Tensor:
        """Where the categories of these rows stand here; anywhere, if they do not."""
        return (index - self.first).clamp_(0, self.here - 1)

    def own(self, values: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
        """`values` of the rows whose category is here, 0 in other rows, NaN where a row holds a NaN."""
        index = index.view(-1, *(1 for _ in values.shape[1:]))
        is_here = (index >= self.first) & (index < self.first + self.here)
        filling = torch.where(index > self.categories, torch.nan, 0.0).to(values.dtype)
        return torch.where(is_here, values, filling, out=out)

    def at_index(self, values: Tensor, index: Tensor, like: Tensor) -> Tensor:
        """Rows that have `values` at the selected categories and are zero elsewhere."""
        own = self.own(values.to(like.dtype), index).unsqueeze(-1)
        return torch.zeros_like(like).scatter_(-1, self.place(index).unsqueeze(-1), own)

    def log_partition(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of each row; -inf in a row without categories."""
        top = self.highest(logits.amax(-1))
        top = torch.where(top == -torch.inf, 0.0, top)
        return top + self.total((logits - top.unsqueeze(-1)).exp_().sum(-1)).log()


def seeded(key: Tensor) -> torch.Generator:
    """A generator whose numbers are determined by `key`."""
    return torch.Generator(key.device).manual_seed(int(key))
