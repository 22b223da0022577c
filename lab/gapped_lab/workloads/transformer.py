"""A small transformer over bytes: with a cache, as `gapped.rollout` calls it, with any feed-forward part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = Sequence[tuple[Tensor, Tensor]]


class Output(NamedTuple):
    last_hidden_state: Tensor
    past_key_values: Cache


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed: nn.Module) -> None:
        super().__init__()
        self.heads, self.feed = heads, feed
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parts = self.inward(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        # With a cache there is one query, which sees all keys.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.outward(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x)), (key, value)


class Transformer(nn.Module):
    """A causal language model whose head is its embedding; `feed(width)` makes the part of each layer."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        feed: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, feed(width)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
    ) -> Output:
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        start = past_key_values[0][0].shape[2] if past_key_values else 0
        x = x * x.shape[-1] ** 0.5 + self.places[start : start + x.shape[1]]
        cache = []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, past_key_values[number] if past_key_values else None)
            cache.append(pair)
        return Output(self.norm(x), cache)


def dense(width: int, hidden: int) -> nn.Module:
    """The feed-forward part of a plain transformer."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def places(text: Tensor, count: int, length: int, seed: int, steps: int = 1) -> Tensor:
    """Where pieces of a text begin, `(steps, count, 1)`: at random places that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(text) - length, (steps, count, 1), generator=generator).to(text.device)


def windows(text: Tensor, start: Tensor, length: int) -> Tensor:
    """The pieces of a text that begin there, `(count, length)`, int64."""
    return text[start + torch.arange(length, device=text.device)].long()
