"""The front door: a sample, or a choice, of one category per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapped.docstrings import documented
from gapped.pathwise import Pathwise, resolve_pathwise

if TYPE_CHECKING:
    from gapped.choice import Choice


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

    Arguments:
        (logits, estimator, dim, mask, generator)

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


@documented
def choose(
    logits: Tensor,
    *,
    estimator: Pathwise | str | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Choice:
    """Draw one category per row by its index, for look-ups and routers.

    It is `gapped.sample` without the one-hot vector, which is never written; what uses the choice never
    multiplies by its zeros. Values and gradients are those of the one-hot sample.

    Arguments:
        (logits, estimator, dim, mask, generator)

    Returns:
        A `Choice`. Its `index` has the shape of the logits without the category axis; `select(table)` looks
        up entries, and `gate()` is a 1 for each row that carries the gradient.

    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> choice = choose(logits, generator=torch.Generator().manual_seed(0))
    >>> choice.index.shape, choice.select(torch.eye(4)).shape, choice.gate()
    (torch.Size([2]), torch.Size([2, 4]), tensor([1., 1.], grad_fn=<_GateBackward>))
    """
    return resolve_pathwise(estimator).choose(logits, dim=dim, mask=mask, generator=generator)
