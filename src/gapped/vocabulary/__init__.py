"""A choice out of a whole vocabulary, from hidden states, without ever holding the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapped.linear.linear_choices import LinearChoice
from gapped.pathwise import Pathwise
from gapped.registry import resolve_pathwise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_choice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    estimator: Pathwise | str | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    group: ProcessGroup | None = None,
) -> LinearChoice:
    """Draw one of V categories per row, without a tensor of all their logits.

    For vocabularies, where a tensor of all logits takes more memory than the model. The rows go through the
    product in chunks, forward and once more backward; in between, the index and a few numbers per row are all
    that is kept. Index, values and gradients are those of `estimator.choose(hidden @ weight.T + bias)`.

    Arguments:
        hidden: `(*rows, d)`. Half precision, and what autocast makes of float32, is multiplied as it is and
            normalised in float32.
        weight: `(V, d)`.
        bias: `(V)`, or None.
        estimator: A pathwise one, as an object or as text; None is the recommended default. For a
            score-function gradient multiply `log_prob` with the reward.
        mask: Booleans that broadcast to `(*rows, V)`; categories where it is False do not exist.
        generator: Where random numbers come from; None is torch's default generator.
        group: A process group over whose ranks the vocabulary is split, lower ranks first. Then `weight`,
            `bias`, `mask` and tables are the rank's own part, `hidden` is the same on every rank, and so are
            the results: index, log-probability, selected rows, the gradient of `hidden`. Rank 0 of the group
            decides the noise. Every rank must make the same calls.

    Returns:
        An object with `index`, `(*rows)`; `select(table)` for the rows of a table such as an embedding, which
        may be `weight` itself; `gate()` for routers; and `log_prob`, `(*rows)`. Their gradients reach
        `hidden`, `weight`, `bias` and the table, and cannot be differentiated again.

    Each use costs one more pass over the chunks in its backward: with `select`, five products of the size
    rows × d × V in all. torch.compile leaves the function and the uses of its result to eager code.
    docs/vocabulary.md has the derivation, the measurements, and how sums are rounded.

    >>> g = torch.Generator().manual_seed(0)
    >>> hidden, embedding = torch.randn(2, 7, 16, requires_grad=True), torch.nn.Embedding(50_000, 16)
    >>> choice = linear_choice(hidden, embedding.weight, estimator="gst:tau=0.5", generator=g)
    >>> choice.index.shape, choice.log_prob.shape, choice.select(embedding.weight).shape
    (torch.Size([2, 7]), torch.Size([2, 7]), torch.Size([2, 7, 16]))
    """
    resolved = resolve_pathwise(estimator)
    if group is None:
        return resolved.choose_linear(hidden, weight, bias, mask=mask, generator=generator)
    from gapped.vocabulary.shards import choose_sharded

    return choose_sharded(resolved, group, hidden, weight, bias, mask, generator)
