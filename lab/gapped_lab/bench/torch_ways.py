"""Workloads in plain torch, where that takes more than an expression: what `gapped` is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapped.nn import Routed, Router


def as_graph(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A way that is recorded at its first call, forward and backward, and replayed afterwards."""

    @cache
    def record(*shapes: torch.Size) -> Callable[..., Tensor]:
        inputs = tuple(torch.zeros(shape, device="cuda", requires_grad=True) for shape in shapes)
        return cast(Callable[..., Tensor], torch.cuda.make_graphed_callables(way, inputs))

    return lambda *inputs: record(*(each.shape for each in inputs))(*inputs)


def product_and_sum(logits: Tensor, tables: Tensor) -> Tensor:
    """Codes ``(N, G, d)`` as Hugging Face's wav2vec2 selects them: all codes times the sample, summed.

    `logits` are ``(N, G, K)``, `tables` ``(G, K, d)``.
    """
    frames, groups, codes = logits.shape
    sample = F.gumbel_softmax(logits.view(frames * groups, codes), hard=True)
    products = sample.view(frames, groups * codes, 1) * tables.view(1, groups * codes, -1)
    return products.view(frames, groups, codes, -1).sum(-2)


def first_of_pairs(logits: Tensor) -> Tensor:
    """Gates by a choice between each logit and zero."""
    pairs = torch.stack([logits, torch.zeros_like(logits)], -1)
    return F.gumbel_softmax(pairs, hard=True)[..., 0]


def through_sigmoid(logits: Tensor) -> Tensor:
    """Gates by a draw from the sigmoid, with the sigmoid's own gradient."""
    p = torch.sigmoid(logits)
    return torch.bernoulli(p.detach()) + p - p.detach()


def six_options(logits: Tensor) -> Tensor:
    """Masks of two of four, ``(N, 4)``, by a choice among all six."""
    options = _options(logits.dtype, logits.device)
    return F.gumbel_softmax(logits @ options.T, hard=True) @ options


@cache
def _options(dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = [[float(i in kept) for i in range(4)] for kept in combinations(range(4), 2)]
    return torch.tensor(rows, dtype=dtype, device=device)


def recursion(logits: Tensor, k: int) -> Tensor:
    r"""Exactly `k` of each row's entries, straight through the marginals, by a recursion over the entries.

    With :math:`Z_i(j)` the sum over the subsets of `j` among the first `i` entries,
    :math:`Z_i(j) = Z_{i-1}(j) + e^{\theta_i} Z_{i-1}(j-1)`, in log space. The marginals are the derivative
    of :math:`\log Z_n(k)`. The sample takes entry `i`, from the last to the first, with the probability
    :math:`e^{\theta_i} Z_{i-1}(j-1) / Z_i(j)` where `j` are still to be taken.
    """
    tables = [table := logits.new_zeros(len(logits), 1)]
    for score in logits.unsqueeze(-1).unbind(1):
        # No more entries are taken than there are: a sum over nothing would have NaN as second derivative.
        longer = [table[:, -1:] + score] if len(tables) <= k else []
        inner = torch.logaddexp(table[:, 1:], table[:, :-1] + score)
        tables.append(table := torch.cat([table[:, :1], inner, *longer], -1))
    (marginals,) = torch.autograd.grad(table[:, k].sum(), logits, create_graph=True)
    with torch.no_grad():
        left, taken = torch.full((len(logits), 1), k, device=logits.device), []
        for i in range(logits.shape[-1] - 1, -1, -1):
            rest = tables[i].gather(-1, (left - 1).clamp(min=0))
            log_p = logits[:, i : i + 1] + rest - tables[i + 1].gather(-1, left)
            takes = (torch.rand_like(log_p).log() < log_p) & (left > 0)
            taken.append(takes)
            left = left - takes.long()
        sample = torch.cat(taken[::-1], -1).to(logits.dtype)
    return sample + marginals - marginals.detach()


def top_k_layer(layer: Router, hidden: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The layer of the workload `router` with the largest probabilities: no draw, and no gradient of one."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(dtype), weight.to(dtype))
    top = logits.softmax(-1).topk(layer.k)
    gates = top.values / top.values.sum(-1, keepdim=True)
    load, counts, *plan = layer._plan(top.indices)
    return through_experts(
        Routed(top.indices, gates, logits, load, counts, layer, None, *plan), hidden, first, second
    )


def through_experts(route: Routed, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Tokens through experts of two products each."""
    return route.run(lambda blocks: torch.bmm(F.silu(torch.bmm(blocks, first)), second), hidden)


class Decoder(nn.Module):
    """A causal language model with a tied head, in the form that `gapped.rollout` takes.

    It is made of tensors that get gradients: the `table`, and four matrices for each layer.
    """

    def __init__(self, table: Tensor, *matrices: Tensor) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1, 1), nn.Linear(1, 1, bias=False)
        for part in (self.embedding, self.head):
            del part.weight
            part.weight = table
        self.layers = [matrices[first : first + 4] for first in range(0, len(matrices), 4)]

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        inputs_embeds: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]] | None = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        x, cache = inputs_embeds, []
        width = x.shape[-1:]
        for number, (attention, out, up, down) in enumerate(self.layers):
            # Heads of 64 features.
            parts = F.linear(F.layer_norm(x, width), attention).chunk(3, -1)
            heads = (each.view(*x.shape[:2], -1, min(64, *width)).transpose(1, 2) for each in parts)
            q, k, v = heads
            if past_key_values is not None:
                k, v = (torch.cat(pair, -2) for pair in zip(past_key_values[number], (k, v), strict=True))
            cache.append((k, v))
            read = F.scaled_dot_product_attention(q, k, v, is_causal=past_key_values is None)
            x = x + F.linear(read.transpose(1, 2).flatten(2), out)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, width), up)), down)
        return SimpleNamespace(last_hidden_state=F.layer_norm(x, width), past_key_values=cache)


def forced(prompts: Tensor, table: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens ``(batch, steps)`` that are given, and the embeddings that a model reads before each of them."""
    tokens = torch.arange(len(prompts) * steps, device=table.device).view(len(prompts), steps) % len(table)
    return tokens, torch.cat([prompts, F.embedding(tokens[:, :-1], table)], 1)


def one_by_one(model: Decoder, embeds: Tensor) -> Tensor:
    """The states of a model that reads a text with its cache, one token after the other."""
    states, cache = [], None
    for token in torch.split(embeds, 1, 1):
        out = model(token, cache)
        states.append(out.last_hidden_state)
        cache = out.past_key_values
    return torch.cat(states, 1)
