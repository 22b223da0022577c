"""An estimator in the place of `torch.nn.functional.gumbel_softmax`, for code that cannot be edited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch.nn.functional
from torch import Tensor

from gapped.checks import ignore_eps
from gapped.errors import reject
from gapped.pathwise import Pathwise, cached_estimator
from gapped.registry import resolve_pathwise
from gapped.texts import DEFAULT, split_text


@contextmanager
def replacing_torch(estimator: Pathwise | str | None = None) -> Iterator[None]:
    """Context in which `F.gumbel_softmax` of torch draws with an estimator.

    For models whose code cannot be edited.

    Arguments:
        estimator: An object or its text; None is the recommended default. Each call decides `tau`, `hard` and
            `dim`, in torch's order of arguments; text may fix the first two, as in "gst:tau=0.85".

    Code that looks the function up when it is called, `F.gumbel_softmax(...)`, gets the estimator; a module
    that did `from torch.nn.functional import gumbel_softmax` before keeps torch's. The replacement holds for
    all threads of the process until the context ends, with an error too; contexts may be nested.

    >>> from torch.nn import functional as F
    >>> logits = torch.zeros(3, requires_grad=True)
    >>> with replacing_torch("gst"):
    ...     z = F.gumbel_softmax(logits, 0.5, True)
    >>> z.sum()
    tensor(1., grad_fn=<SumBackward0>)
    """
    kind, own = _kind_and_options(estimator)

    def gumbel_softmax(
        logits: Tensor, tau: float | Tensor = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
    ) -> Tensor:
        """The place of torch's function, with its signature."""
        ignore_eps(eps)
        options = {"tau": tau, "hard": bool(hard), **own}
        return cached_estimator(kind, **options).sample(logits, dim=dim)

    functions: Any = torch.nn.functional
    before = functions.gumbel_softmax
    functions.gumbel_softmax = gumbel_softmax
    try:
        yield
    finally:
        functions.gumbel_softmax = before


def _kind_and_options(estimator: Pathwise | str | None) -> tuple[type[Pathwise], dict[str, Any]]:
    """The class of an estimator, and the options that it has whatever a call says."""
    resolved = resolve_pathwise(DEFAULT if estimator is None else estimator)
    if isinstance(estimator, Pathwise):
        if isinstance(estimator.tau, Tensor) or estimator.tau != 1:
            accepted = "tau=1: each call has its own temperature; text such as 'gst:tau=0.5' may fix it"
            raise reject("estimator", estimator, accepted)
        kept = {field.name for field in fields(resolved)} - {"tau", "hard"}
    else:
        kept = set(split_text(DEFAULT if estimator is None else estimator)[1])
    return type(resolved), {name: getattr(resolved, name) for name in kept}
