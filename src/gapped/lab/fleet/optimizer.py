"""Adam over stacked weights, with a learning rate per run, that leaves frozen runs alone; clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_NORM_EPS = 1e-6


class Adam:
    """The update of `torch.optim.Adam`, for parameters whose first axis is the run axis.

    The step count and the learning rates are tensors on the parameters' device, so that a captured graph
    reads their present values.
    """

    def __init__(
        self, parameters: Sequence[Tensor], learning_rate: Tensor, *, compiled: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.count = torch.zeros((), dtype=torch.float64, device=learning_rate.device)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        # Compiled, each weight is read and written once per step instead of a dozen times. The step sizes,
        # which all weights share, are compiled separately, so that they are computed once.
        self._sizes = torch.compile(step_sizes, dynamic=False) if compiled else step_sizes
        self._update = torch.compile(update, dynamic=False) if compiled else update

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], alive: Tensor, scales: Tensor | None = None) -> None:
        """One update of the runs that are `alive`, a boolean per run, by gradients times `scales`, if any."""
        self.count += 1
        size, root = self._sizes(self.learning_rate, self.count)
        self._update(self.parameters, gradients, scales, self.first, self.second, size, root, alive)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "first": self.first, "second": self.second}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count.copy_(state["count"])  # type: ignore[arg-type]
        for name in ("first", "second"):
            for mine, theirs in zip(getattr(self, name), state[name], strict=True):  # type: ignore[call-overload]
                mine.copy_(theirs)


def step_sizes(learning_rate: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The learning rates over the first moment's bias correction, and the square root of the second's."""
    return learning_rate / (1 - _BETAS[0] ** count), (1 - _BETAS[1] ** count).sqrt()


def update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scales: Tensor | None,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    size: Tensor,
    root: Tensor,
    alive: Tensor,
) -> None:
    """One Adam update in place; `size` and `root` are `step_sizes`."""
    for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
        g = scaled(gradient, scales)
        shape = (-1,) + (1,) * (p.dim() - 1)
        m.lerp_(g, 1 - _BETAS[0])
        v.mul_(_BETAS[1]).addcmul_(g, g, value=1 - _BETAS[1])
        change = size.to(p.dtype).view(shape) * m / (v.sqrt() / root.to(p.dtype) + _EPS)
        # Selected, not multiplied by zero: a frozen run's moments may be NaN, its weights must not become so.
        p.sub_(torch.where(alive.view(shape), change, 0.0))


@torch.no_grad()
def clip_scales(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """What to multiply each run's gradients by for a norm of at most `limit` over all weights, ``(R,)``.

    The rule of `torch.nn.utils.clip_grad_norm_`, for gradients whose first axis is the run axis. The products
    are left to `update`, which reads the gradients anyway: as tensors of their own, all weights would go
    through memory twice more.
    """
    each = torch.stack([vector_norm(gradient.flatten(1), dim=1) for gradient in gradients], 1)
    norms: Tensor = vector_norm(each, dim=1)
    return (limit / (norms + _NORM_EPS)).clamp(max=1.0)


def scaled(gradient: Tensor, scales: Tensor | None) -> Tensor:
    """A gradient times the runs' `scales`, if there are any."""
    # Not in place: autograd may give two weights one and the same tensor.
    return gradient if scales is None else gradient * scales.view(-1, *(1,) * (gradient.dim() - 1))
