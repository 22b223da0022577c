"""The model: word vectors, a leaf LSTM, the latent tree, a classifier of its root."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter, init

from gapped.lab.data.listops.language import VOCABULARY
from gapped.lab.fleet.layers import Linear
from gapped.lab.tasks.listops.leaf import lstm
from gapped.lab.tasks.listops.protocol import Protocol
from gapped.lab.tasks.listops.sampler import Sampler
from gapped.lab.tasks.listops.tree import latent_tree

CLASSES = 10
_SMALL = 0.002


class TreeClassifier(torch.nn.Module):
    """R latent-tree classifiers (Choi, Yoo, Lee 2018), side by side.

    Initial values, as published: word vectors and query N(0, 0.01); leaf LSTM with Kaiming normal input
    weights, orthogonal recurrent weights and forget bias 1; orthogonal tree cell; classifier Kaiming normal,
    its last layer uniform in +-0.002. All other biases are zero. The leaf LSTM has two biases, as torch's
    has: under Adam their sum moves twice as fast as one would.
    """

    def __init__(self, protocol: Protocol, runs: Sequence[torch.Generator], *, fused: bool = False) -> None:
        super().__init__()
        d = self.width = protocol.width
        self.dropout, self.fused = protocol.dropout, fused
        words = len(VOCABULARY)
        self.embedding = _stacked(runs, (words, d), _normal)
        self.input_weight = _stacked(runs, (4 * d, d), _kaiming, transposed=True)
        self.recurrent_weight = _stacked(runs, (4 * d, d), _orthogonal, transposed=True)
        self.input_bias = Parameter(torch.zeros(len(runs), 1, 4 * d))
        self.recurrent_bias = Parameter(torch.zeros(len(runs), 1, 4 * d))
        self.tree_weight = _stacked(runs, (5 * d, 2 * d), _orthogonal, transposed=True)
        self.tree_bias = Parameter(torch.zeros(len(runs), 1, 5 * d))
        self.query = _stacked(runs, (1, d), _normal)
        self.hidden, self.output = Linear(d, d, runs), Linear(d, CLASSES, runs)
        self.hidden.weight = _stacked(runs, (d, d), _kaiming, transposed=True)
        self.output.weight = _stacked(runs, (CLASSES, d), _uniform, transposed=True)
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
        root, merges = latent_tree(leaves, *cell, lengths, sampler, generator, fused=self.fused)
        hidden = self.hidden(drop(root, rate, generator)).relu()
        return self.output(drop(hidden, rate, generator)), merges

    def leaves(self, tokens: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
        """Leaf states ``(R, B, M, 2d)``."""
        runs, batch, count = tokens.shape
        flat = tokens.reshape(runs, batch * count, 1)
        # Products with one-hot rows: their gradient is a product too, not a race for seventeen rows.
        known = torch.arange(self.embedding.shape[1], device=tokens.device)
        # Dropout's factor is for the few words of the table, not for all of their occurrences.
        words = torch.bmm((flat == known).to(self.embedding.dtype), self.embedding / (1 - rate))
        bias = self.input_bias + self.recurrent_bias
        gates = torch.baddbmm(bias, zeroed(words, rate, generator), self.input_weight)
        return lstm(gates.view(runs, batch, count, -1), self.recurrent_weight, fused=self.fused)


def drop(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """Dropout with a generator of its own."""
    return zeroed(x / (1 - rate), rate, generator) if rate else x


def zeroed(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """`x` with each number zero at the probability `rate`."""
    if rate == 0:
        return x
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate, generator=generator)
    return torch.where(kept, x, 0.0)


_Initialiser = Callable[[Tensor, torch.Generator], Tensor]


def _stacked(
    runs: Sequence[torch.Generator], shape: tuple[int, int], fill: _Initialiser, transposed: bool = False
) -> Parameter:
    """One weight per run, ``(outputs, inputs)`` as `fill` sees it, stored transposed like `Linear`'s."""
    each = [fill(torch.empty(shape), generator) for generator in runs]
    return Parameter(torch.stack([w.t().contiguous() for w in each] if transposed else each))


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    return init.normal_(weight, 0.0, 0.01, generator=generator)


def _kaiming(weight: Tensor, generator: torch.Generator) -> Tensor:
    return init.kaiming_normal_(weight, generator=generator)


def _orthogonal(weight: Tensor, generator: torch.Generator) -> Tensor:
    return init.orthogonal_(weight, generator=generator)


def _uniform(weight: Tensor, generator: torch.Generator) -> Tensor:
    return init.uniform_(weight, -_SMALL, _SMALL, generator=generator)
