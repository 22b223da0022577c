"""Tokens that a causal language model draws one after the other, with gradients through what it drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gapped.checks import (
    check_count,
    check_flag,
    check_mask,
    check_tensor,
    holds,
    is_integer,
    without_autocast,
)
from gapped.choice import _look_up
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import first_order
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.simplex import slices
from gapped.vocabulary import LinearChoice, check_ordinary, choice_of, linear_choice
from gapped.vocabulary.head import Draws, Layer, rows_of_a_chunk


@documented
def rollout(
    model: nn.Module,
    inputs: Tensor,
    steps: int,
    *,
    estimator: Pathwise | str | None = None,
    temperature: float = 1.0,
    stop: int | Sequence[int] | None = None,
    mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    feedback: bool = False,
    checkpoint: bool = False,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Draw tokens from a causal language model, with gradients through the draws.

    Each token is fed back as its embedding. Its law is the softmax of the model's logits, which are never
    held. A loss of the tokens' embeddings sends its gradient through the draws to the model's parameters and
    to `inputs`. Under `torch.no_grad()` this is an ordinary exact sampler.

    Arguments:
        model: A causal language model of transformers; or a module with `get_input_embeddings()` and
            `get_output_embeddings()`, an `nn.Embedding` and an `nn.Linear`, which is called with
            `inputs_embeds`, `past_key_values` and `use_cache` and returns an object with `last_hidden_state`
            and `past_key_values`. It stays in the mode in which it is, training or evaluation.
        inputs: The prompts: tokens `(batch, length)`, or embeddings `(batch, length, d)`.
        steps: How many tokens to draw, at most.
        temperature: Divides the logits, for law and gradient alike: a positive number.
        stop: A token, or several, that end a text. Where all texts are over there are fewer steps.
        mask: Booleans, `(V)` or `(batch, V)`; tokens where it is False are never drawn.
        attention_mask: `(batch, length)`, zeros where a prompt is padded, on its left side.
        feedback: Whether the gradient of a token goes through the tokens drawn after it, too, which read it.
            Over more than a few tokens that gradient explodes, and all steps are kept for it. Without, texts
            are drawn first, and then read once more, all tokens at a time, for the gradient; where dropout is
            on, it has other zeros then.
        checkpoint: Whether, with feedback, only keys, values and last states of a step are kept, and its
            other activations are computed again in the backward pass.

    Returns:
        A `gapped.Rollout`: the tokens, their embeddings, which carry the gradient, rows of other tables,
        log-probabilities and entropies. Behind its stop token a text repeats the first of `stop`; all the
        rest is zero there.

    A step calls the model on one token for each text, with its cache. docs/tokens.md has the memory, and the
    models that are refused.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    >>> text = rollout(model, torch.tensor([[1, 2, 3]]), steps=4)
    >>> text.index.shape, text.embeddings.shape, text.log_prob.shape
    (torch.Size([1, 4]), torch.Size([1, 4, 8]), torch.Size([1, 4]))
    >>> text.embeddings.square().sum().backward()  # a cost of the tokens, through all draws
    """
    check_count("steps", steps, least=0)
    check_flag("feedback", feedback)
    check_flag("checkpoint", checkpoint)
    if checkpoint and not feedback:
        raise reject("checkpoint", True, "False without feedback, where the model's own checkpoints do that")
    embedding, head = _ends(model)
    prompts = embeds = _embed(inputs, embedding)
    check_ordinary("inputs", embeds)
    batch, table, weight, bias = len(embeds), embedding.weight, head.weight, head.bias
    check_mask(mask, embeds.new_empty(()).expand(batch, len(weight)))
    stops = torch.tensor(_tokens(stop, len(weight)), dtype=torch.int64, device=embeds.device)
    how: dict[str, Any] = {"estimator": resolve_pathwise(estimator), "temperature": temperature}
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if is_integer(most) and steps and embeds.shape[1] + steps - 1 > most:
        got = f"{steps} after a prompt of {embeds.shape[1]}"
        raise reject("steps", got, f"fewer: {type(model).__name__} has {most} positions")
    trunk = _Trunk(_decoder(model, head), _padding(attention_mask, embeds), checkpoint)
    live = torch.ones(batch, dtype=torch.bool, device=embeds.device)
    choices: list[LinearChoice] = []
    drawn: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    wants_gradient = torch.is_grad_enabled()
    with (
        torch.set_grad_enabled(wants_gradient and feedback),
        _own_checkpoints(trunk.decoder, wants_gradient and feedback),
    ):
        ports = _Ports.apply(choices, (steps, batch), mask, temperature, weight, bias, table)[0].unbind()  # type: ignore[no-untyped-call]
        for port in ports:
            state = trunk(embeds)
            layer = (state, weight.detach(), None if bias is None else bias.detach())
            choice = linear_choice(*layer, mask=mask, generator=generator, **how)
            row, index = choice.select(table.detach()) + port, choice.index
            if len(stops):
                row, index = torch.where(live.unsqueeze(-1), row, 0.0), torch.where(live, index, stops[0])
            # Without the graph of the states: it leads to the ports, which keep the choices.
            choices.append(replace(choice, _layer=Layer(state.detach(), weight, bias, mask)))
            drawn.append((index, row, state, live))
            embeds = row.unsqueeze(1)
            if len(stops):
                live = live & ~torch.isin(index, stops)
                if not live.any():
                    break
    if not drawn:
        index, live = live.new_empty(batch, 0, dtype=torch.int64), live.new_empty(batch, 0)
        rows, hidden = (embeds.new_empty(batch, 0, each.shape[1]) for each in (table, weight))
        return Rollout(
            index, rows, hidden, live, [linear_choice(hidden.transpose(0, 1), weight, bias, **how)]
        )
    index, rows, hidden, live = (torch.stack(each) for each in zip(*drawn, strict=True))
    is_read_again = wants_gradient and not feedback
    if is_read_again:
        # Read as tokens: an embedding gets the gradient of what is read, but not the choice of the token.
        read = torch.where(live.unsqueeze(-1), _look_up(table, index, len(table), False), 0.0)[:-1]
        hidden = trunk.at_once(torch.cat([prompts, read.transpose(0, 1)], 1))[-len(rows) :]
    together = _together(choices, hidden, mask, temperature, weight, bias, is_read_again)
    if is_read_again:
        rows = torch.cat([choice.select(table) for choice in together], 1)
        rows = torch.where(live.unsqueeze(-1), rows, 0.0)
    return Rollout(index.mT, rows.transpose(0, 1), hidden.transpose(0, 1), live.mT, together)


@dataclass(frozen=True, eq=False)
class Rollout:
    """Texts that a model drew, with the gradient of each token.

    `gapped.rollout` returns it.

    Arguments:
        index: The tokens, int64, `(batch, steps)`.
        embeddings: Their rows of the model's embedding, which carry the gradient, `(batch, steps, d)`.
        hidden: The states that they were drawn from, `(batch, steps, d)`, or that were read again.
        live: Whether a token belongs to its text: True up to its stop token, `(batch, steps)`.
    """

    index: Tensor
    embeddings: Tensor
    hidden: Tensor
    live: Tensor
    _choices: list[LinearChoice]

    def __repr__(self) -> str:
        return f"Rollout(index={self.index})"

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of each token, `(batch, steps)`, with its gradient."""
        return self._each(lambda choice: choice.log_prob)

    @property
    def entropy(self) -> Tensor:
        """The entropy of each token's law, `(batch, steps)`, with its gradient: one more product."""
        return self._each(lambda choice: choice.entropy)

    def select(self, table: Tensor) -> Tensor:
        """The tokens' rows of another table `(V, *rest)`, with their gradient: `(batch, steps, *rest)`.

        It may be the embedding of a model that judges the texts. Behind its end a text has rows of zeros.
        """
        return self._each(lambda choice: choice.select(table))

    def _each(self, use: Callable[[LinearChoice], Tensor]) -> Tensor:
        values = torch.cat([use(choice) for choice in self._choices], 1).transpose(0, 1)
        live = self.live.view(*self.live.shape, *(1 for _ in values.shape[2:]))
        return torch.where(live, values, 0.0)


class _Ports(torch.autograd.Function):
    """Zeros that are added to the selected rows of each step, and bring their gradients together.

    A step sends gradients to its states alone. Weight, bias and table get theirs from all steps at once: each
    step by itself would write a tensor of the size of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        choices: list[LinearChoice],
        shape: tuple[int, int],
        mask: Tensor | None,
        temperature: float,
        weight: Tensor,
        bias: Tensor | None,
        table: Tensor,
    ) -> tuple[Tensor, Tensor]:
        anchor = table.new_empty(0)
        ctx.choices, ctx.temperature, ctx.is_tied = choices, temperature, table is weight
        ctx.save_for_backward(anchor, mask, weight, bias, table)
        return table.new_zeros(*shape, table.shape[1]), anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, *tensors = ctx.saved_tensors
        return None, None, None, None, *first_order(_gradients, anchor, grad, ctx, *tensors)


def _gradients(
    grad: Tensor, ctx: Any, mask: Tensor | None, weight: Tensor, bias: Tensor | None, table: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias and table, by those of the selected rows, `(steps, batch, d)`."""
    choices: list[LinearChoice] = ctx.choices
    hidden = torch.stack([each._layer.hidden for each in choices])
    tensors = zip((weight, bias, table), ctx.needs_input_grad[4:], strict=True)
    own_weight, own_bias, own_table = (
        None if each is None else each.detach().requires_grad_(need) for each, need in tensors
    )
    own_table = own_weight if ctx.is_tied else own_table
    assert own_weight is not None
    assert own_table is not None
    with torch.enable_grad():
        together = _together(choices, hidden, mask, ctx.temperature, own_weight, own_bias)
        rows = torch.cat([choice.select(own_table) for choice in together], 1)
    leaves = (own_weight, own_bias, own_table)
    needed = {id(each): each for each in leaves if each is not None and each.requires_grad}
    found = torch.autograd.grad(rows, [*needed.values()], grad[: len(choices)])
    gradients = dict(zip(needed, found, strict=True))
    # A table that is the weight has its gradient there.
    return tuple(gradients.pop(id(each), None) for each in leaves)


def _together(
    choices: list[LinearChoice],
    hidden: Tensor,
    mask: Tensor | None,
    temperature: float,
    weight: Tensor,
    bias: Tensor | None,
    is_read_again: bool = False,
) -> list[LinearChoice]:
    """The choices of all steps as one, `(steps, texts)`, for each group of texts that share keys.

    `hidden` `(steps, batch, d)` are their states: those that they were drawn from, or nearly so.
    """
    head, batch = choices[0]._head, hidden.shape[1]
    if temperature != 1:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    drawn = [each._draws for each in choices]
    if is_read_again:
        with torch.no_grad(), without_autocast(hidden.device):
            drawn = [
                each._head.draw(Layer(state, weight, bias, mask), each._draws.category)
                for each, state in zip(choices, hidden, strict=True)
            ]
    together = []
    for number, texts in enumerate(slices(batch, head.step)):
        states = hidden[:, texts]
        own = head._replace(
            estimator=head.estimator.of_rows(head.shape, texts),
            shape=states.shape[:2],
            keys=torch.stack([each._head.keys[number] for each in choices]),
            step=states.shape[1],
            least=rows_of_a_chunk(head.estimator, len(weight), hidden.device, False),
        )
        exists = mask if mask is None or mask.dim() < 2 else mask.expand(batch, -1)[texts]
        steps = zip(*(each.of(texts) for each in drawn), strict=True)
        draws = Draws(*(None if each[0] is None else torch.cat(each) for each in steps))  # type: ignore[arg-type]
        together.append(choice_of(draws, own, Layer(states, weight, bias, exists)))
    return together


@contextmanager
def _own_checkpoints(decoder: nn.Module, are_kept: bool) -> Iterator[None]:
    """A block with or without the model's own checkpoints, for which transformers leaves out the cache."""
    parts: list[Any] = [part for part in decoder.modules() if getattr(part, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = are_kept
    try:
        yield
    finally:
        for part in parts:
            part.gradient_checkpointing = True


class _Trunk:
    """The model below its head, with what it has read so far."""

    def __init__(self, decoder: nn.Module, padding: Tensor | None, checkpoint: bool) -> None:
        self.decoder, self.padding, self.checkpoint = decoder, padding, checkpoint
        self.cache: Any = None
        self.past: list[list[Tensor]] = []
        """With checkpoints: keys and values of each layer in turn, in the pieces that steps computed."""

    def __call__(self, embeds: Tensor) -> Tensor:
        """The last state of each text, `(batch, d)`, once it has read `embeds` too."""
        where = self._positions(embeds)
        if self.checkpoint and torch.is_grad_enabled():
            return self._read_again_later(embeds, where)
        state, self.cache = self._read(embeds, self.cache, where)
        return state

    def at_once(self, embeds: Tensor) -> Tensor:
        """The states of whole texts, which steps have read before, `(length, batch, d)`."""
        self.cache, where = None, {}
        if self.padding is not None:
            places = (self.padding.cumsum(-1) - 1).clamp(min=0)
            where = {"attention_mask": self.padding, "position_ids": places}
        out = self.decoder(inputs_embeds=embeds, past_key_values=None, use_cache=False, **where)
        states: Tensor | None = getattr(out, "last_hidden_state", None)
        if states is None or states.shape[:2] != embeds.shape[:2]:
            got = f"{type(self.decoder).__name__}, which does not return the states of all tokens"
            raise reject("model", got, "one that returns them, or feedback=True")
        return states.transpose(0, 1)

    def _positions(self, embeds: Tensor) -> dict[str, Tensor]:
        if self.padding is None:
            return {}
        if self.cache is None and not self.past:
            places = self.padding.cumsum(-1) - 1
        else:
            self.padding = torch.cat([self.padding, self.padding.new_ones(len(embeds), 1)], 1)
            places = self.padding.sum(-1, keepdim=True) - 1
        return {"attention_mask": self.padding, "position_ids": places.clamp(min=0)}

    def _read(self, embeds: Tensor, cache: Any, where: dict[str, Tensor]) -> tuple[Tensor, Any]:
        out = self.decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True, **where)
        states, cache = (getattr(out, name, None) for name in ("last_hidden_state", "past_key_values"))
        if states is None or cache is None:
            missing = "last_hidden_state" if states is None else "past_key_values"
            accepted = "one that returns it; with gradient checkpointing it does so without feedback"
            raise reject("model", f"{type(self.decoder).__name__}, which returns no {missing}", accepted)
        return states[:, -1], cache

    def _read_again_later(self, embeds: Tensor, where: dict[str, Tensor]) -> Tensor:
        past, kind = [tuple(pieces) for pieces in self.past], type(self.cache)
        state: Tensor

        def read(embeds: Tensor) -> tuple[Any, ...]:
            cache: Any = kind() if past else None
            for number in range(0, len(past), 2):
                keys, values = (torch.cat(past[number + n], -2) for n in (0, 1))
                cache.update(keys, values, number // 2)
            state, cache = self._read(embeds, cache, where)
            layers = getattr(cache, "layers", [None])
            if not all(
                hasattr(layer, "keys") and not getattr(layer, "is_sliding", False) for layer in layers
            ):
                got = f"True with a {type(cache).__name__} of other layers"
                raise reject("checkpoint", got, "False, or a cache of keys and values at every position")
            if not past:
                self.cache = cache
            pieces = (each for layer in layers for each in (layer.keys, layer.values))
            # Copies: a view of all keys would keep all of them.
            return state, *(each[..., -embeds.shape[1] :, :].clone() for each in pieces)

        state, *pieces = torch.utils.checkpoint.checkpoint(read, embeds, use_reentrant=False)
        self.past = self.past or [[] for _ in pieces]
        for before, piece in zip(self.past, pieces, strict=True):
            before.append(piece)
        return state


_CHECKED: WeakSet[nn.Module] = WeakSet()
"""Models whose logits are known to be their head's product."""


def _ends(model: object) -> tuple[nn.Embedding, nn.Linear]:
    """The embedding and the head of a model."""
    accepted = (
        "a causal language model of transformers, or a module with its methods: see help(gapped.rollout)"
    )
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")):
        raise reject("model", f"an object of type {type(model).__name__}", accepted)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise reject("model", f"{type(model).__name__}, an encoder with a decoder", accepted)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, part, kind in (("embedding", embedding, nn.Embedding), ("head", head, nn.Linear)):
        # Not by isinstance: a subclass may scale what it returns.
        if getattr(type(part), "forward", None) is not kind.forward:
            own = None if part is None else f"{type(part).__module__}.{type(part).__name__}"
            got = f"{type(model).__name__}, whose {name} is {own}"
            raise reject("model", got, f"one with a plain torch.nn.{kind.__name__} for it")
    if len(embedding.weight) != len(head.weight):
        got = f"{len(embedding.weight)} embeddings and {len(head.weight)} logits"
        raise reject("model", got, "as many embeddings as logits")
    return embedding, head


def _decoder(model: nn.Module, head: nn.Linear) -> nn.Module:
    """The model below its head; its logits must be the head's product of the states that it returns."""
    # A compiled model is compiled with its head.
    model = getattr(model, "_orig_mod", model)
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    try:
        signature(decoder.forward).bind(inputs_embeds=None, past_key_values=None, use_cache=True)
    except TypeError:
        accepted = "one that can be called with inputs_embeds, past_key_values and use_cache alone"
        raise reject("model", f"{type(decoder).__name__}, whose forward does not", accepted) from None
    if decoder is model or model in _CHECKED:
        return decoder
    seen: list[Any] = []
    token = head.weight.new_zeros(1, 1, model.get_input_embeddings().weight.shape[1])  # type: ignore[operator]
    logits = torch.linspace(-100, 100, len(head.weight), dtype=head.weight.dtype, device=token.device).view(
        1, 1, -1
    )
    hooks = (
        decoder.register_forward_hook(
            lambda _, inputs, out: seen.append(getattr(out, "last_hidden_state", None))
        ),
        head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])),
        head.register_forward_hook(lambda *_: logits),
    )
    try:
        # Dropout must not draw from the caller's generator here.
        with torch.no_grad(), torch.random.fork_rng([token.device] if token.is_cuda else []):
            found = model(inputs_embeds=token, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    is_plain = len(seen) == 2 and isinstance(seen[0], Tensor) and torch.equal(*seen)
    if not is_plain or not torch.equal(found.to(logits.dtype), logits):
        got = f"{type(model).__name__}, which changes states before its head or logits behind it"
        raise reject("model", got, "one whose logits are its head's product of its last states")
    _CHECKED.add(model)
    return decoder


def _embed(inputs: object, embedding: nn.Embedding) -> Tensor:
    """The embeddings of prompts."""
    count, width = embedding.weight.shape
    accepted = f"tokens (batch, length) or embeddings (batch, length, {width}), of at least one"
    inputs = check_tensor("inputs", inputs, accepted)
    is_embedded = inputs.is_floating_point()
    fits = inputs.dim() == 2 + is_embedded and 0 not in inputs.shape and inputs.shape[2:] in ((), (width,))
    if not fits or not (is_embedded or inputs.dtype in (torch.int32, torch.int64)):
        raise reject("inputs", f"a tensor of shape {tuple(inputs.shape)} and {inputs.dtype}", accepted)
    if inputs.device != embedding.weight.device:
        raise reject(
            "inputs", f"a tensor on {inputs.device}", f"one on {embedding.weight.device}, as the model"
        )
    if is_embedded:
        return inputs
    if holds((inputs < 0) | (inputs >= count)):
        raise reject("inputs", "tokens out of range", f"tokens from 0 to {count - 1}")
    embeds: Tensor = embedding(inputs)
    return embeds


def _tokens(stop: object, count: int) -> list[int]:
    """The tokens that end a text."""
    given = [] if stop is None else list(stop) if isinstance(stop, list | tuple) else [stop]
    tokens = [each for each in given if is_integer(each) and 0 <= each < count]
    if len(tokens) < len(given):
        raise reject("stop", stop, f"a token from 0 to {count - 1}, a list of such, or None")
    return tokens


def _padding(attention_mask: object, embeds: Tensor) -> Tensor | None:
    """An attention mask of prompts, int64."""
    if attention_mask is None:
        return None
    shape = tuple(embeds.shape[:2])
    accepted = f"a tensor of shape {shape}, zeros at padding on the left and ones elsewhere"
    attention_mask = check_tensor("attention_mask", attention_mask, accepted)
    if attention_mask.shape != shape:
        raise reject("attention_mask", f"a tensor of shape {tuple(attention_mask.shape)}", accepted)
    padding = attention_mask.long()
    if holds((padding != padding.cummax(-1).values) | (padding[:, -1:] != 1)):
        raise reject("attention_mask", "padding on the right, or other numbers", accepted)
    return padding
