"""Sampling as modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_logits, check_mask
from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.quantizers import Quantized as Quantized
from gapped.quantizers import Quantizer as Quantizer
from gapped.registry import resolve_pathwise


class Sample(torch.nn.Module):
    """Samples with an estimator while training; in eval mode samples as well, or takes the mode.

    `estimator` is an object or its text; None is the recommended default. `eval` is ``"sample"`` or
    ``"argmax"``; the argmax carries no gradient. The module has no parameters. Its temperature may be set
    while training: ``layer.tau = 0.5``.

    >>> layer = Sample("gst:tau=0.5", eval="argmax").eval()
    >>> layer(torch.tensor([0.1, 0.7, 0.2]))
    tensor([0., 1., 0.])
    """

    def __init__(
        self,
        estimator: Pathwise | str | None = None,
        *,
        dim: int = -1,
        eval: Literal["sample", "argmax"] = "sample",
    ) -> None:
        super().__init__()
        if eval not in ("sample", "argmax"):
            raise reject("eval", eval, "'sample' or 'argmax'")
        self.estimator = resolve_pathwise(estimator)
        self.dim = dim
        self.eval_mode = eval

    @property
    def tau(self) -> float | Tensor:
        """The temperature of the estimator."""
        return self.estimator.tau

    @tau.setter
    def tau(self, tau: float | Tensor) -> None:
        self.estimator = replace(self.estimator, tau=tau)

    def forward(
        self, logits: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        if self.training or self.eval_mode == "sample":
            return self.estimator.sample(logits, dim=self.dim, mask=mask, generator=generator)
        check_logits(logits, self.dim)
        check_mask(mask, logits, self.dim)
        with torch.no_grad():
            scores = simplex.masked(logits.detach(), mask).movedim(self.dim, -1)
            return simplex.one_hot(simplex.argmax_index(scores), scores.shape[-1], scores.dtype).movedim(
                -1, self.dim
            )

    def extra_repr(self) -> str:
        return f"{self.estimator}, dim={self.dim}, eval={self.eval_mode!r}"
