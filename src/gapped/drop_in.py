"""An estimator in the place of `torch.nn.functional.gumbel_softmax`, for code that cannot be edited."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
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

    function: Callable[..., Any]
    has_served: bool = False


class Place:
    """A function of a module that contexts replace. They may end in any order; the last one is in force."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name, self._lock = module, name, threading.Lock()
        self._active: list[_Replacement] = []
        self._before: Any = None
        """The function that was there before the first of them."""

    @contextmanager
    def hold(self, function: Callable[..., Any], unused: str) -> Iterator[None]:
        """Context with `function` in this place; one that ends without having served a call warns."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            replacement.has_served = True
            return function(*args, **options)

        replacement = _Replacement(call)
        with self._lock:
            if not self._active:
                self._before = getattr(self._module, self._name)
            self._active.append(replacement)
            setattr(self._module, self._name, call)
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(replacement)
                in_force = self._active[-1].function if self._active else self._before
                setattr(self._module, self._name, in_force)
                # A call that an inner context served has reached the outer ones, too.
                for other in self._active:
                    other.has_served = other.has_served or replacement.has_served
        if not replacement.has_served:
            # Five frames up: this one, the context around it and the two of contextlib, the caller's.
            warnings.warn(unused, stacklevel=5)


_PLACE = Place(torch.nn.functional, "gumbel_softmax")


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
        options = {"hard": bool(hard), **own}
        if "tau" not in own:
            options["tau"] = _as_torch_broadcasts(tau, logits, dim) if isinstance(tau, Tensor) else tau
        return cached_estimator(kind, **options).sample(logits, dim=dim)

    unused = (
        "replacing_torch: F.gumbel_softmax was not called. Code that imported the name before, or that has "
        "a function of its own, is not reached"
    )
    with _PLACE.hold(gumbel_softmax, unused):
        yield


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
