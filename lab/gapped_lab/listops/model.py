"""The model: word vectors, a leaf LSTM whose states are the leaves, the latent tree, a classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, init

from gapped_lab.fleet.run_layers import Linear
from gapped_lab.listops import ListOpsProtocol
from gapped_lab.listops.examples import CHARACTERS
from gapped_lab.listops.language import VOCABULARY
from gapped_lab.listops.tables import Sampler
from gapped_lab.listops.tree import latent_tree

CLASSES = 10


class TreeClassifier(torch.nn.Module):
    """R latent-tree classifiers (Choi, Yoo, Lee 2018), side by side.

    Initial values, as published: word vectors and query N(0, 0.01); leaf LSTM with Kaiming normal input
    weights, orthogonal recurrent weights and forget bias 1; orthogonal tree cell; classifier Kaiming normal,
    its last layer uniform in +-0.002. All other biases are zero. The leaf LSTM has two biases, as torch's
    has: under Adam their sum moves twice as fast as one would.
    """

    def __init__(self, protocol: ListOpsProtocol, runs: Sequence[torch.Generator]) -> None:
        super().__init__()
        d = self.width = protocol.width
        self.dropout = protocol.dropout
        words = len(CHARACTERS if protocol.characters else VOCABULARY)
        normal, uniform = partial(init.normal_, std=0.01), partial(init.uniform_, a=-0.002, b=0.002)
        self.embedding = _stack(runs, (words, d), normal)
        self.input_weight = _stack(runs, (4 * d, d), init.kaiming_normal_, transposed=True)
        self.recurrent_weight = _stack(runs, (4 * d, d), init.orthogonal_, transposed=True)
        self.input_bias = Parameter(torch.zeros(len(runs), 1, 4 * d))
        self.recurrent_bias = Parameter(torch.zeros(len(runs), 1, 4 * d))
        self.tree_weight = _stack(runs, (5 * d, 2 * d), init.orthogonal_, transposed=True)
        self.tree_bias = Parameter(torch.zeros(len(runs), 1, 5 * d))
        self.query = _stack(runs, (1, d), normal)
        self.hidden, self.output = Linear(d, d, runs), Linear(d, CLASSES, runs)
        self.hidden.weight = _stack(runs, (d, d), init.kaiming_normal_, transposed=True)
        self.output.weight = _stack(runs, (CLASSES, d), uniform, transposed=True)
        with torch.no_grad():
            self.input_bias[..., d : 2 * d] = 1
            self.hidden.bias.zero_()
            self.output.bias.zero_()

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        sampler: Sampler,
        generator: torch.Generator | None = None,
        *,
        dropout: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Class logits ``(R, B, 10)`` of token ids ``(R, B, M)``, and the merges of `latent_tree`."""
        rate = self.dropout if dropout else 0.0
        leaves = self.leaves(tokens, rate, generator)
        cell = (self.tree_weight, self.tree_bias, self.query)
        root, merges = latent_tree(leaves, *cell, lengths, sampler, generator)
        hidden = self.hidden(drop(root, rate, generator)).relu()
        return self.output(drop(hidden, rate, generator)), merges

    def leaves(self, tokens: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
        """Leaf states ``(R, B, M, 2d)``."""
        runs, batch, count = tokens.shape
        flat = tokens.reshape(runs, batch * count, 1)
        # A product with one-hot rows: its gradient is a product too, and not atomic sums into seventeen rows.
        vocabulary = torch.arange(self.embedding.shape[1], device=tokens.device)
        # Dropout's factor is applied to the few words of the table instead of to all of their occurrences.
        words = torch.bmm((flat == vocabulary).to(self.embedding.dtype), self.embedding / (1 - rate))
        bias = self.input_bias + self.recurrent_bias
        gates = torch.baddbmm(bias, zero(words, rate, generator), self.input_weight)
        return lstm(gates.view(runs, batch, count, -1), self.recurrent_weight)


def lstm(inputs: Tensor, weight: Tensor) -> Tensor:
    """States ``(R, B, M, 2d)``, h and c side by side, of an LSTM that starts from zero.

    `inputs` ``(R, B, M, 4d)`` are the gates without their recurrent part, in torch's order: input, forget,
    cell, output. `weight` is ``(R, d, 4d)``. The gradient of the weight is one product for all tokens.
    """
    return _LSTM.apply(inputs, weight)  # type: ignore[no-any-return, no-untyped-call]


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        runs, batch, count, four = inputs.shape
        gates = torch.empty_like(inputs)
        states = inputs.new_empty(runs, count + 1, batch, four // 2)
        states[:, 0] = 0
        for step in range(count):
            before = states[:, step]
            torch.bmm(before[..., : four // 4], weight, out=gates[:, :, step])
            advance(gates[:, :, step], inputs[:, :, step], before, states[:, step + 1])
        ctx.save_for_backward(gates, states, weight)
        return states[:, 1:].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gates, states, weight = ctx.saved_tensors
        runs, batch, count, four = gates.shape
        width, back = four // 4, weight.transpose(1, 2)
        grads = torch.empty_like(gates)
        grad_h, grad_c = grad.new_zeros(2, runs, batch, width)
        for step in reversed(range(count)):
            out = grads[:, :, step]
            retreat(gates[:, :, step], states[:, step], grad[:, :, step], grad_h, grad_c, out)
            torch.bmm(out, back, out=grad_h)
        before = states[:, :-1, :, :width].transpose(1, 2).reshape(runs, -1, width)
        return grads, torch.bmm(before.transpose(1, 2), grads.flatten(1, 2))


def advance(gates: Tensor, inputs: Tensor, before: Tensor, after: Tensor) -> None:
    """Add `inputs` to the recurrent part in `gates`, both ``(R, B, 4d)``, and write the state `after`."""
    width = gates.shape[-1] // 4
    gates += inputs
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * before[..., width:] + i.sigmoid() * g.tanh()
    after[..., width:] = c
    after[..., :width] = o.sigmoid() * c.tanh()


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    """Write the gradient of the gates to `out`, and that of the cell before in the place of `grad_c`.

    `own` ``(R, B, 2d)`` is the gradient of the state itself, `grad_h` and `grad_c` are from the step after.
    """
    width = gates.shape[-1] // 4
    before = before[..., width:]
    grad_h, total = own[..., :width] + grad_h, own[..., width:] + grad_c
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    top = (f * before + i * g).tanh()
    total = total + grad_h * o * (1 - top * top)
    slopes = (
        total * g * i * (1 - i),
        total * before * f * (1 - f),
        total * i * (1 - g * g),
        grad_h * top * o * (1 - o),
    )
    out.copy_(torch.cat(slopes, -1))
    grad_c.copy_(total * f)


def drop(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """Dropout with a generator of its own."""
    return zero(x / (1 - rate), rate, generator) if rate else x


def zero(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """`x` with each number zero at the probability `rate`."""
    if rate == 0:
        return x
    keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate, generator=generator)
    return torch.where(keep, x, 0.0)


def _stack(
    runs: Sequence[torch.Generator],
    shape: tuple[int, int],
    fill: Callable[..., Tensor],
    transposed: bool = False,
) -> Parameter:
    """One weight per run, ``(outputs, inputs)`` as `fill` sees it, stored transposed like `Linear`'s."""
    each = [fill(torch.empty(shape), generator=generator) for generator in runs]
    return Parameter(torch.stack([w.t().contiguous() for w in each] if transposed else each))
