"""Descriptions of the arguments that the functions of all estimators share, each written once."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from textwrap import fill, indent
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])

ARGUMENTS = {
    "logits": """Unnormalised log-probabilities θ of any floating dtype and shape, the K categories on the
        axis `dim`; each vector along it is a row. A category with the logit -inf does not exist.""",
    "tau": """Temperature τ of the gradient: a positive number, or a tensor that broadcasts against the
        logits' shape without the category axis. It does not change the law of hard samples.""",
    "hard": """True returns one-hot vectors, False the surrogate itself, a point of the simplex. Both have
        the same gradient.""",
    "draw": """"sample" draws the category from softmax(θ); "argmax" takes the largest logit. The gradient
        is the estimator's own for that category.""",
    "dim": "The category axis.",
    "mask": """Booleans that broadcast against the logits, with all of their axes where `dim` is not the
        last one. A category where it is False does not exist: no mass, no gradient.""",
    "generator": """Where random numbers come from; None is torch's default generator, the only one that
        torch.compile supports.""",
    "eps": "Accepted as in torch, without effect.",
    "backend": """"torch", "triton", or "auto": Triton on a GPU where it can, else torch.""",
}


def documented(function: _F) -> _F:
    """Put descriptions in the place of each line of the docstring that holds names alone, as ``(tau, hard)``.

    >>> def f(dim, mask): "(dim)"
    >>> documented(f).__doc__
    'dim: The category axis.'
    """

    def descriptions(line: re.Match[str]) -> str:
        texts = [f"{name}: {' '.join(ARGUMENTS[name].split())}" for name in line[2].split(", ")]
        return "\n".join(indent(fill(each, 100, subsequent_indent="    "), line[1]) for each in texts)

    if function.__doc__:  # there is none under python -OO
        function.__doc__ = re.sub(
            r"^( *)\(([\w, ]+)\)$", descriptions, cleandoc(function.__doc__), flags=re.M
        )
    return function
