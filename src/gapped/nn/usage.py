"""How the layers of a model use their categories while it trains: perplexity, entropy, dead codes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.nn.layers import Sample
from gapped.nn.quantizers import Quantized, Quantizer
from gapped.nn.router import Routed, Router


class _Sums(NamedTuple):
    """Sums over the rows of some calls."""

    probabilities: Tensor
    """`(groups, K)`."""
    taken: Tensor
    """How often each category was taken, `(groups, K)`."""
    entropy: Tensor
    rows: Tensor


class Usage:
    """Measures how the layers of a model use their categories.

    It watches every `gapped.nn.Sample`, `Quantizer` and `Router` of the model in training mode, until `close`
    or the end of a `with` block. `read` returns what was seen since the last time, and `write` sends it to a
    logger. For each layer, by its name in the model:

    - perplexity: exp of the entropy of the average probabilities, from 1 to the number of categories; for a
      quantizer, the mean over its groups.
    - entropy: the average entropy of a row's probabilities, in nats. Near 0, every choice is certain.
    - dead: categories that no row has taken.

    A layer that serves rows of several widths has measures for each: `layer[8]/dead`, `layer[16]/dead`. A
    compiled model calls what was attached before its first call: attach first. `read` warns where no layer
    was called at all.

    Arguments:
        module: The model whose layers are watched.

    >>> from gapped import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), nn.Sample())
    >>> with Usage(model) as usage:
    ...     y = model(torch.randn(100, 3))
    ...     sorted(usage.read())
    ['1/dead', '1/entropy', '1/perplexity']
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """`module` is the model whose layers are watched, until `close` or the end of a `with` block."""
        layers = {
            n: each for n, each in module.named_modules() if isinstance(each, Sample | Quantizer | Router)
        }
        if not layers:
            accepted = "one with gapped.nn.Sample, Quantizer or Router"
            raise reject("module", f"a {type(module).__name__} without them", accepted)
        self._sums: dict[tuple[str, int], _Sums] = {}
        self._was_called = False
        self._hooks = [
            layer.register_forward_hook(partial(self._watch, name or type(layer).__name__), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def read(self) -> dict[str, float]:
        """The measures of each layer that was called since the last `read`, as `layer/measure`."""
        if not self._was_called:
            warnings.warn(
                "Usage: no layer was called. Attach it before a compiled model is called for the first time",
                stacklevel=2,
            )
        values, layers = {}, [layer for layer, _ in self._sums]
        for (layer, width), (probabilities, taken, entropy, rows) in self._sums.items():
            name = layer if layers.count(layer) == 1 else f"{layer}[{width}]"
            mean = probabilities / probabilities.sum(-1, keepdim=True)
            values[f"{name}/perplexity"] = torch.special.entr(mean).sum(-1).exp().mean().item()
            values[f"{name}/entropy"] = (entropy / rows).item()
            values[f"{name}/dead"] = float((taken == 0).sum())
        self._sums.clear()
        return values

    def write(self, logger: Any, step: int) -> dict[str, float]:
        """Send what `read` returns to a logger, and return it.

        Arguments:
            logger: A TensorBoard `SummaryWriter`, an object with a method `log(values, step=...)` such as a
                run of Weights & Biases, or a function of values and step.
            step: The step of training that the values belong to.
        """
        if not (hasattr(logger, "add_scalar") or hasattr(logger, "log") or callable(logger)):
            accepted = "a SummaryWriter, a W&B run, or a function of values and step"
            raise reject("logger", f"an object of type {type(logger).__name__}", accepted)
        values = self.read()
        if hasattr(logger, "add_scalar"):
            for name, value in values.items():
                logger.add_scalar(name, value, step)
        elif hasattr(logger, "log"):
            logger.log(values, step=step)
        else:
            logger(values, step)
        return values

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Usage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _watch(
        self, name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._was_called = True
        if not layer.training:
            return
        if isinstance(result, Quantized):
            logits = result.logits.reshape(-1, *result.logits.shape[-2:])
            index = result.indices.reshape(*logits.shape[:-1], 1)
        elif isinstance(result, Routed):
            logits = result.logits.reshape(-1, 1, result.logits.shape[-1])
            index = result.index.reshape(len(logits), 1, -1)
        else:
            given = {**dict(zip(("logits", "mask"), args, strict=False)), **kwargs}
            masked = simplex.masked(given["logits"], given.get("mask")).movedim(layer.dim, -1)
            logits = masked.reshape(-1, 1, masked.shape[-1])
            index = result.movedim(layer.dim, -1).reshape_as(logits).argmax(-1, keepdim=True)
        # Rows without a category, or with a NaN, take none.
        p = simplex.softmax(simplex.computed(logits))
        exists = (p.sum(-1) > 0).all(-1)
        p = torch.where(exists[:, None, None], p, 0.0)
        taken = simplex.one_hot(index, logits.shape[-1], torch.float32).sum(-2)
        taken = taken.where(p.sum(-1, keepdim=True) > 0, 0.0)
        entropy = torch.special.entr(p).sum(-1).mean(-1).sum()
        seen = _Sums(p.sum(0), taken.sum(0), entropy, exists.sum())
        key = name, logits.shape[-1]
        if key in self._sums:
            seen = _Sums(*(a + b for a, b in zip(self._sums[key], seen, strict=True)))
        self._sums[key] = seen
