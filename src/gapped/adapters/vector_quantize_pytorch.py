"""Estimators for vector-quantize-pytorch: the draw of a code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vector_quantize_pytorch.vector_quantize_pytorch import VectorQuantize, gumbel_sample

from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise


def draw_codes(
    logits: Tensor,
    temperature: float = 1.0,
    stochastic: bool = False,
    straight_through: bool = False,
    dim: int = -1,
    training: bool = True,
    topk: int | None = None,
    *,
    estimator: Pathwise | str | None = None,
) -> tuple[Tensor, Tensor]:
    """The draw of a codebook, `gumbel_sample` there: an index and its one-hot vector with a gradient.

    Arguments:
        logits: Negative distances to the codes.
        temperature: Divides the logits, before the estimator's own temperature.
        stochastic: Whether to draw; else the nearest code is taken, with the estimator's gradient.
        straight_through: Whether there is a gradient.
        dim: The axis of the codes.
        training: Whether the module trains; else the nearest code is taken.
        topk: Several codes at once are left to the library's own function.
        estimator: A pathwise estimator, an object or its text; None is the recommended default.
    """
    if topk is not None or not straight_through or not training or temperature <= 0:
        own: tuple[Tensor, Tensor] = gumbel_sample(
            logits, temperature, stochastic, straight_through, dim, training, topk
        )
        return own
    resolved: Any = resolve_pathwise(estimator)
    if not stochastic:
        resolved = replace(resolved, draw="argmax")
    one_hot = resolved.sample(logits / temperature, dim=dim)
    return one_hot.argmax(dim), one_hot


def use(module: torch.nn.Module, estimator: Pathwise | str | None = None) -> int:
    """Let all layers inside of `module` that draw codes straight through draw them by an estimator.

    The gradient of the draw reaches the layer's input. By default the library replaces that gradient by the
    one of its output, as if the layer were the identity; `route_gradients_to_input` becomes False here.

    Arguments:
        module: A model with layers `VectorQuantize(straight_through=True, rotation_trick=False)`.
        estimator: A pathwise estimator, an object or its text; None is the recommended default.

    Returns:
        The number of layers.
    """
    resolved = resolve_pathwise(estimator)
    layers = [each for each in module.modules() if isinstance(each, VectorQuantize)]
    layers = [each for each in layers if each._codebook.gumbel_sample.keywords["straight_through"]]
    if not layers:
        raise reject("module", f"a {type(module).__name__}", "one with VectorQuantize(straight_through=True)")
    for layer in layers:
        options = {**layer._codebook.gumbel_sample.keywords, "estimator": resolved}
        layer._codebook.gumbel_sample = partial(draw_codes, **options)
        layer.route_gradients_to_input = False
    return len(layers)
