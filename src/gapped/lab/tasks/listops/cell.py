"""The composition cell of the tree, and its vector-Jacobian product, as plain functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def compose(gates: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
    r"""State of a node from the gates ``(..., 5d)`` and the cells ``(..., d)`` of its children.

    .. math:: c = \sigma(f_l + 1)\, c_l + \sigma(f_r + 1)\, c_r + \sigma(i) \tanh(u), \qquad
              h = \sigma(o) \tanh(c).
    """
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    c = (f_left + 1).sigmoid() * c_left + (f_right + 1).sigmoid() * c_right + i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


def compose_vjp(
    gates: Tensor, c_left: Tensor, c_right: Tensor, grad_h: Tensor, grad_c: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates and of both children's cells, from those of the node's ``h`` and ``c``."""
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    i, f_left, f_right = i.sigmoid(), (f_left + 1).sigmoid(), (f_right + 1).sigmoid()
    u, o = u.tanh(), o.sigmoid()
    top = (f_left * c_left + f_right * c_right + i * u).tanh()
    grad_c = grad_c + grad_h * o * (1 - top * top)
    parts = (
        grad_c * u * i * (1 - i),
        grad_c * c_left * f_left * (1 - f_left),
        grad_c * c_right * f_right * (1 - f_right),
        grad_c * i * (1 - u * u),
        grad_h * top * o * (1 - o),
    )
    return torch.cat(parts, -1), grad_c * f_left, grad_c * f_right
