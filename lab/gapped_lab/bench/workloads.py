"""What `gapped bench --work` measures: work that people write with `F.gumbel_softmax`, in several ways.

A *workload* is a function of its sizes that returns a `Problem`: the shapes of its inputs, and the ways to
do it, torch's first. Each has its sizes for a GPU, and small ones for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped
from gapped.errors import reject, suggestion
from gapped_lab.bench import jax_ways, torch_ways
from gapped_lab.bench.cases import DTYPES

Way = Callable[..., Any]
Sizes = tuple[int, ...]

DEFAULT = gapped.GapMax()


@dataclass(frozen=True)
class Problem:
    """A workload at one size."""

    inputs: tuple[Sizes, ...]
    """Shapes of the tensors that the ways take; gradients go to all of them."""
    result: Sizes | None
    """The shape of the incoming gradient; None where the forward pass alone counts."""
    ways: Mapping[str, Way]
    parts: Mapping[str, Way] = field(default_factory=dict)
    """What every way contains, to compare with: forward alone."""
    logits: Sizes | None = None
    """The shape of the logits, where they are not the first input."""
    scale: float = 1.0
    """The standard deviation of the inputs: logits that are made of them have 1."""
    jax: bool = False
    """Whether the ways are functions of a JAX key and JAX arrays."""


@dataclass(frozen=True)
class Task:
    """A workload to be measured at one size."""

    work: str
    sizes: Sizes
    dtype: str

    @property
    def problem(self) -> Problem:
        return WORKLOADS[self.work][0](*self.sizes)

    @property
    def cases(self) -> tuple[str, ...]:
        """The names of all that is measured."""
        return *self.problem.ways, *self.problem.parts

    @property
    def logits_bytes(self) -> int:
        """The size of one logits tensor."""
        shape = self.problem.logits or self.problem.inputs[0]
        return math.prod(shape) * DTYPES[self.dtype].itemsize


def tasks(names: Sequence[str], device: torch.device) -> list[Task]:
    """The workloads called `names`, or ``all``, at their sizes for the device; those in JAX come last."""
    for name in names:
        if name not in (*WORKLOADS, "all"):
            accepted = f"all or one of {', '.join(WORKLOADS)}{suggestion(name, WORKLOADS)}"
            raise reject("--work", name, accepted)
    wanted = [name for name in WORKLOADS if name in names or "all" in names]
    return [task(name, text) for name in wanted for text in WORKLOADS[name][1][device.type]]


def task(name: str, text: str) -> Task:
    """A workload at a size given as text.

    >>> task("subsets", "4096x1024x64:f32").sizes
    (4096, 1024, 64)
    """
    sizes, _, dtype = text.partition(":")
    return Task(name, tuple(map(int, sizes.split("x"))), dtype)


def quantizer(frames: int, groups: int, codes: int, width: int) -> Problem:
    """wav2vec2's: in each of several groups, a code is chosen and looked up in the group's own table."""
    return Problem(
        inputs=((frames, groups, codes), (groups, codes, width)),
        result=(frames, groups, width),
        ways={
            "F.gumbel_softmax, product and sum": torch_ways.product_and_sum,
            "F.gumbel_softmax, einsum": lambda logits, tables: torch.einsum(
                "ngk,gkd->ngd", F.gumbel_softmax(logits, hard=True), tables
            ),
            "choose and select": lambda logits, tables: DEFAULT.choose(logits).select(tables),
        },
    )


def channels(*sizes: int) -> Problem:
    """The categories are the channels of images: dim=1 of (N, C, H, W)."""
    return Problem(
        inputs=(sizes,),
        result=sizes,
        ways={
            "F.gumbel_softmax": lambda logits: F.gumbel_softmax(logits, hard=True, dim=1),
            "gapped.sample": lambda logits: gapped.sample(logits, dim=1),
        },
    )


def gates(count: int) -> Problem:
    """Bernoulli samples by their log-odds; in torch, one of a pair, or straight through the sigmoid."""
    return Problem(
        inputs=((count,),),
        result=(count,),
        ways={
            "F.gumbel_softmax of pairs": torch_ways.first_of_pairs,
            "sigmoid, straight-through": torch_ways.through_sigmoid,
            "gapped.gate": gapped.gate,
        },
    )


def masks(groups: int, size: int) -> Problem:
    """N:M masks, two of each four entries; in torch, one of six options."""
    return Problem(
        inputs=((groups, size),),
        result=(groups, size),
        ways={
            "F.gumbel_softmax of six options": torch_ways.six_options,
            "gapped.nm_mask": lambda logits: gapped.nm_mask(logits, 2, 4),
        },
    )


def subsets(rows: int, entries: int, k: int) -> Problem:
    """Exactly k of n entries; in torch, a recursion over the entries."""
    return Problem(
        inputs=((rows, entries),),
        result=(rows, entries),
        ways={
            "recursion in torch": lambda logits: torch_ways.recursion(logits, k),
            "gapped.subset": lambda logits: gapped.subset(logits, k),
            "gapped.subset, gst": lambda logits: gapped.subset(logits, k, estimator=gapped.GST(gap=1.0)),
        },
    )


def experts(rows: int, entries: int, k: int) -> Problem:
    """k of n experts by index, with numbers to multiply their results with: a router without its experts."""

    def largest(logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1)
        return p.gather(-1, p.topk(k).indices)

    ways: dict[str, Way] = {
        "softmax, topk, gather": largest,
        "choose and gate": lambda logits: gapped.choose(logits, k=k).gate(),
        "choose and weights": lambda logits: gapped.choose(logits, k=k).weights(),
    }
    if torch.cuda.is_available():
        # Without the time that Python takes to start them.
        ways |= {f"{name}, CUDA graph": torch_ways.as_graph(way) for name, way in ways.items()}
    return Problem(inputs=((rows, entries),), result=(rows, k), ways=ways)


def vocabulary(rows: int, width: int, categories: int) -> Problem:
    """From hidden states to the embedding of a sampled token."""
    return Problem(
        inputs=((rows, width), (categories, width), (categories, width)),
        result=(rows, width),
        logits=(rows, categories),
        scale=width**-0.25,
        ways={
            "F.gumbel_softmax": lambda hidden, weight, table: (
                F.gumbel_softmax(hidden @ weight.T, hard=True) @ table
            ),
            "choose, dense logits": lambda hidden, weight, table: DEFAULT.choose(hidden @ weight.T).select(
                table
            ),
            "gapped.linear_choice": lambda hidden, weight, table: DEFAULT.choose_linear(
                hidden, weight
            ).select(table),
        },
        parts={"the product alone": lambda hidden, weight, table: hidden @ weight.T},
    )


def decoding(rows: int, width: int, categories: int) -> Problem:
    """From hidden states to a sampled token, without a gradient."""
    return Problem(
        inputs=((rows, width), (categories, width)),
        result=None,
        logits=(rows, categories),
        scale=width**-0.25,
        ways={
            "torch.multinomial": lambda hidden, weight: torch.multinomial(
                torch.softmax(hidden @ weight.T, -1, dtype=torch.float32), 1
            ),
            "choose, dense logits": lambda hidden, weight: DEFAULT.choose(hidden @ weight.T).index,
            "gapped.linear_choice": lambda hidden, weight: DEFAULT.choose_linear(hidden, weight).index,
        },
        parts={"the product alone": lambda hidden, weight: hidden @ weight.T},
    )


def rollout(texts: int, steps: int, width: int, layers: int, categories: int) -> Problem:
    """Texts of a language model with gradients, beside teacher forcing of as many tokens.

    All have a number for each token. The steps without draws are what a model with a cache costs by itself.
    """

    def dense(prompts: Tensor, table: Tensor, *matrices: Tensor) -> Tensor:
        tokens, embeds = torch_ways.forced(prompts, table, steps)
        states = torch_ways.Decoder(table, *matrices)(embeds).last_hidden_state
        log_p = torch.log_softmax(states @ table.T, -1, dtype=torch.promote_types(table.dtype, torch.float32))
        return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def scored(prompts: Tensor, table: Tensor, *matrices: Tensor) -> Tensor:
        tokens, embeds = torch_ways.forced(prompts, table, steps)
        states = torch_ways.Decoder(table, *matrices)(embeds).last_hidden_state
        return gapped.linear_choice(states, table, index=tokens).log_prob

    def read(prompts: Tensor, table: Tensor, *matrices: Tensor) -> Tensor:
        _, embeds = torch_ways.forced(prompts, table, steps)
        return torch_ways.one_by_one(torch_ways.Decoder(table, *matrices), embeds).square().sum(-1)

    def drawn(feedback: bool, prompts: Tensor, table: Tensor, *matrices: Tensor) -> Tensor:
        model = torch_ways.Decoder(table, *matrices)
        return gapped.rollout(model, prompts, steps, feedback=feedback).embeddings.square().sum(-1)

    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    return Problem(
        inputs=((texts, 1, width), (categories, width), *shapes * layers),
        result=(texts, steps),
        logits=(texts * steps, categories),
        scale=width**-0.5,
        ways={
            "teacher forcing, dense logits": dense,
            "teacher forcing, linear_choice": scored,
            "steps without draws": read,
            "gapped.rollout": partial(drawn, False),
            "gapped.rollout, feedback=True": partial(drawn, True),
        },
    )


def mixture(rows: int, categories: int, width: int) -> Problem:
    """A soft sample times a table: a mixture of its rows, as in attacks on text."""
    return Problem(
        inputs=((rows, categories), (categories, width)),
        result=(rows, width),
        ways={
            "F.gumbel_softmax, product": lambda logits, table: F.gumbel_softmax(logits) @ table,
            "gapped.gumbel_softmax, product": lambda logits, table: gapped.gumbel_softmax(logits) @ table,
            "mix": gapped.GumbelSoftmax(1.0).mix,
        },
    )


def rao(rows: int, categories: int) -> Problem:
    """Gumbel-Rao with ten draws, at a temperature whose power is a square and at another."""
    return Problem(
        inputs=((rows, categories),),
        result=(rows, categories),
        ways={
            "F.gumbel_softmax": lambda logits: F.gumbel_softmax(logits, hard=True),
            "gapped.gumbel_rao, tau=0.5": lambda logits: gapped.gumbel_rao(logits, 0.5, samples=10),
            "gapped.gumbel_rao, tau=0.7": lambda logits: gapped.gumbel_rao(logits, 0.7, samples=10),
        },
    )


def router(tokens: int, width: int, experts: int, k: int) -> Problem:
    """A mixture of experts, each of two products and half as wide, with room for 1.25 times an even load."""
    inner = width // 2
    plain = gapped.nn.Router(width, experts, k, capacity=1.25)
    mean = gapped.nn.Router(width, experts, k, capacity=1.25, others="mean")

    def with_router(layer: gapped.nn.Router, hidden: Tensor, weight: Tensor, *expert: Tensor) -> Tensor:
        # Running means belong to the device of the tokens.
        route = torch.func.functional_call(layer.to(hidden.device), {"projection.weight": weight}, hidden)
        return torch_ways.through_experts(route, hidden, *expert)

    return Problem(
        inputs=((tokens, width), (experts, width), (experts, width, inner), (experts, inner, width)),
        result=(tokens, width),
        logits=(tokens, experts),
        scale=width**-0.25,
        ways={
            "softmax and topk": partial(torch_ways.top_k_layer, plain),
            "gapped.nn.Router": partial(with_router, plain),
            "gapped.nn.Router, others=mean": partial(with_router, mean),
        },
    )


def in_jax(rows: int, categories: int) -> Problem:
    """One of K in JAX, compiled."""
    return Problem(
        inputs=((rows, categories),),
        result=(rows, categories),
        ways={
            "Gumbel-softmax in jnp": jax_ways.gumbel_softmax,
            "gapped.jax.gst, XLA": partial(jax_ways.gst, backend="xla"),
            "gapped.jax.gst, kernels": partial(jax_ways.gst, backend="triton"),
        },
        jax=True,
    )


# Each with its sizes by the type of the device.
WORKLOADS: dict[str, tuple[Callable[..., Problem], dict[str, tuple[str, ...]]]] = {
    "quantizer": (quantizer, {"cuda": ("7992x2x320x128:f32",), "cpu": ("50x2x320x128:f32",)}),
    "channels": (channels, {"cuda": ("64x8192x32x32:f32",), "cpu": ("4x512x8x8:f32",)}),
    "gates": (gates, {"cuda": ("100000000:f32",), "cpu": ("65536:f32",)}),
    "masks": (masks, {"cuda": ("25000000x4:f32",), "cpu": ("50000x4:f32",)}),
    "subsets": (subsets, {"cuda": ("4096x1024x64:f32",), "cpu": ("32x64x8:f32",)}),
    "experts": (experts, {"cuda": ("16384x128x8:f32",), "cpu": ("1024x64x8:f32",)}),
    "vocabulary": (
        vocabulary,
        {"cuda": ("8192x4096x128256:bf16", "32768x2048x50304:bf16"), "cpu": ("256x64x4000:f32",)},
    ),
    "decoding": (
        decoding,
        {"cuda": ("64x4096x128256:bf16", "64x2048x50304:bf16"), "cpu": ("64x64x4000:f32",)},
    ),
    "router": (router, {"cuda": ("16384x1024x64x2:bf16",), "cpu": ("256x64x8x2:f32",)}),
    "rollout": (rollout, {"cuda": ("8x256x1024x12x151936:bf16",), "cpu": ("4x16x64x2x4000:f32",)}),
    "mixture": (
        mixture,
        {"cuda": ("8192x32000x768:f32", "8192x32000x768:bf16"), "cpu": ("1024x4096x64:f32",)},
    ),
    "rao": (
        rao,
        {"cuda": ("1048576x64:f32", "8192x32000:f32", "4096x128256:bf16"), "cpu": ("2048x64:f32",)},
    ),
    "jax": (in_jax, {"cuda": ("1048576x64:f32", "8192x128256:bf16"), "cpu": ("16384x64:f32",)}),
}
