"""Estimators for torchlogix: which gate a neuron is, and the bits of look-up tables and thresholds."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torchlogix.layers.binarization import LearnableBinarization
from torchlogix.parametrization import LightLUTParametrization, RawLUTParametrization, WarpLUTParametrization

from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise


def use(module: torch.nn.Module, estimator: Pathwise | str | None = None) -> int:
    """Let all parts of a model that sample while they train, do so by an estimator.

    A raw parametrisation has a one-hot choice among the gates of each neuron. The others, and learned
    thresholds, have bits: gates in the sense of `gapped.gate`. Evaluation stays torchlogix's.

    Arguments:
        module: A model of torchlogix.
        estimator: A pathwise estimator, an object or its text; None is the recommended default. Its
            temperature takes the place of the model's.

    Returns:
        The number of parts.
    """
    resolved, count = resolve_pathwise(estimator), 0
    for part in module.modules():
        if isinstance(part, RawLUTParametrization):
            part._sample_train = resolved.sample
        elif isinstance(part, WarpLUTParametrization | LightLUTParametrization):
            part._sample_train = resolved.gate
        elif isinstance(part, LearnableBinarization):
            part._sample_train = partial(_threshold, resolved)
        else:
            continue
        count += 1
    if count == 0:
        raise reject("module", f"a {type(module).__name__}", "a model with layers of torchlogix")
    return count


def _threshold(estimator: Pathwise, x: Tensor, thresholds: Tensor) -> Tensor:
    return estimator.gate(x - thresholds)
