"""An estimator in the place of `torch.nn.functional.gumbel_softmax`, for code that cannot be edited."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch.nn.functional
from torch import Tensor

from gapped.checks import ignore_eps
from gapped.errors import reject
from gapped.pathwise import Pathwise, cached_estimator, resolve_pathwise
from gapped.pathwise.gumbel_softmax import GumbelSoftmax
from gapped.texts import split_text


@dataclass(eq=False)
class _Replacement:
    """One context."""

    function: Callable[..., Tensor]
    has_served: bool = False


_FUNCTIONS: Any = torch.nn.functional
_lock = threading.Lock()
_active: list[_Replacement] = []
"""The contexts that have not ended, the last one in force: they may end in any order."""
_torchs: list[Any] = []
"""The function that was there before the first of them."""


@contextmanager
def replacing_torch(estimator: Pathwise | str | None = None) -> Iterator[None]:
    """Context in which `F.gumbel_softmax` of torch draws with an estimator.

    For models whose code cannot be edited.

    Arguments:
        estimator: An object or its text; None is the default, GapMax. Each call decides `hard` and `dim`, in
            torch's order of arguments. The temperature is the estimator's own, since a call's was chosen for
            another one; with the text "gumbel-softmax", torch's own function, each call decides that too.

    Code that looks the function up when it is called, `F.gumbel_softmax(...)`, gets the estimator; a module
    that did `from torch.nn.functional import gumbel_softmax` before keeps torch's. The replacement holds for
    all threads of the process until the context ends, with an error too. Contexts may be nested, and may
    overlap: the one that began last is in force. One that ends without having served a call warns.

    A `tau` that is a tensor broadcasts against the logits, as in torch, with size 1 on the category axis.

    >>> from torch.nn import functional as F
    >>> logits = torch.zeros(3, requires_grad=True)
    >>> with replacing_torch():
    ...     z = F.gumbel_softmax(logits, 0.5, True)
    >>> z.sum()
    tensor(1., grad_fn=<SumBackward0>)
    """
    kind, own = _kind_and_options(estimator)

    def gumbel_softmax(
        logits: Tensor, tau: float | Tensor = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
    ) -> Tensor:
        """The place of torch's function, with its signature."""
        ignore_eps(eps)
        replacement.has_served = True
        options = {"hard": bool(hard), **own}
        if "tau" not in own:
            options["tau"] = _as_torch_broadcasts(tau, logits, dim) if isinstance(tau, Tensor) else tau
        return cached_estimator(kind, **options).sample(logits, dim=dim)

    replacement = _Replacement(gumbel_softmax)
    _begin(replacement)
    try:
        yield
    finally:
        _end(replacement)
    if not replacement.has_served:
        # Three frames up: this one, that of contextlib, the caller's.
        warnings.warn(
            "replacing_torch: F.gumbel_softmax was not called. Code that imported the name before, or that "
            "has a function of its own, is not reached",
            stacklevel=3,
        )


def _begin(replacement: _Replacement) -> None:
    with _lock:
        if not _active:
            _torchs[:] = [_FUNCTIONS.gumbel_softmax]
        _active.append(replacement)
        _FUNCTIONS.gumbel_softmax = replacement.function


def _end(replacement: _Replacement) -> None:
    with _lock:
        _active.remove(replacement)
        _FUNCTIONS.gumbel_softmax = _active[-1].function if _active else _torchs[0]
        # A call that an inner context served has reached the outer ones, too.
        for other in _active:
            other.has_served = other.has_served or replacement.has_served


def _as_torch_broadcasts(tau: Tensor, logits: Tensor, dim: int) -> Tensor:
    """A temperature with all axes of the logits: torch aligns it with them, their category axis included."""
    missing = logits.dim() - tau.dim()
    if tau.dim() == 0 or not -logits.dim() <= dim < logits.dim():
        return tau
    aligned = tau.reshape((1,) * max(missing, 0) + tuple(tau.shape))
    if missing < 0 or aligned.shape[dim] != 1:
        accepted = f"one that broadcasts to {tuple(logits.shape)}, of size 1 on the category axis"
        raise reject("tau", f"a tensor of shape {tuple(tau.shape)}", accepted)
    return aligned


def _kind_and_options(estimator: Pathwise | str | None) -> tuple[type[Pathwise], dict[str, Any]]:
    """The class of an estimator, and the options that it has whatever a call says."""
    resolved = resolve_pathwise(estimator)
    kept = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
    said = split_text(estimator)[1] if isinstance(estimator, str) else {}
    if "hard" not in said:
        del kept["hard"]
    if isinstance(estimator, str) and type(resolved) is GumbelSoftmax and "tau" not in said:
        del kept["tau"]
    return type(resolved), kept
