"""Descriptions of arguments that several docstrings share, each written once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import cleandoc, isclass, isfunction, signature
from textwrap import fill, indent
from typing import TypeVar

_T = TypeVar("_T", bound=Callable[..., object])

ARGUMENTS = {
    "logits": """Unnormalised log-probabilities θ of any floating dtype and shape, the K categories on the
        axis `dim`; each vector along it is a row. A category with the logit -inf does not exist.""",
    "tau": """Temperature τ of the gradient: a positive number, or a tensor that broadcasts against the
        logits' shape without the category axis. It does not change the law of hard samples.""",
    "hard": """True returns one-hot vectors, False the surrogate itself, a point of the simplex. Both have
        the same gradient.""",
    "gap": """Least lead γ of the drawn category over the others: "auto", which gives each category the gap
        that Gumbel noise would, and needs no tuning to the number of categories; a number (0.8 to 1.2 in the
        paper, for 10 categories); a tensor that broadcasts as `tau` does; or a function of the drawn
        probability, such as `gapped.expected_gap`.""",
    "detach": """False differentiates the perturbation as well, with a gap function's own slope, the paper's
        NZ ablation. It trains badly, and needs another gap than "auto".""",
    "tau_forward": """Temperature τ_f of the draw, a number or a tensor as `tau`; 1 keeps the logits' own
        law.""",
    "smoothing": """s in the help of `gapped.mve`, a number or a tensor as `tau`. 0 is the authors' limit
        t → ∞, ∞ straight-through; they train with t = 1/s growing from 1 to a million.""",
    "samples": "Over how many draws of noise the surrogate is averaged.",
    "draw": """"sample" draws the category from softmax(θ); "argmax" takes the largest logit. The gradient
        is the estimator's own for that category.""",
    "estimator": """A pathwise one, as an object such as `gapped.GST(tau=0.5)` or its text such as
        "gst:tau=0.5"; None is the default, GapMax, which needs no tuning.""",
    "dim": "The category axis.",
    "mask": """Booleans that broadcast against the logits, with all of their axes where `dim` is not the
        last one. A category where it is False does not exist: no mass, no gradient.""",
    "generator": """Where random numbers come from; None is torch's default generator, the only one that
        torch.compile supports.""",
    "eps": "Accepted as in torch, without effect.",
    "backend": """"torch", "triton", or "auto": Triton on a GPU where it can, else torch.""",
    "hidden": """`(*rows, d)`. Half precision, and what autocast makes of float32, is multiplied as it is and
        normalised in float32.""",
    "weight": "`(V, d)`, a row for each of the V categories.",
    "bias": "`(V)`, or None.",
}
"""The arguments of estimators in torch."""
_IN_JAX = {
    name: text.replace("a tensor", "an array").replace("`dim`", "`axis`").replace("`gapped.", "`gapped.jax.")
    for name, text in ARGUMENTS.items()
}
JAX_ARGUMENTS = {
    **{name: _IN_JAX[name] for name in ("hard", "gap", "tau_forward", "samples", "estimator")},
    "key": "A random key, such as `jax.random.key(0)`.",
    "logits": _IN_JAX["logits"] + " A row with a NaN or +inf gives NaN.",
    "tau": _IN_JAX["tau"].removesuffix(".") + ", and gets no gradient itself.",
    "axis": ARGUMENTS["dim"],
    "where": _IN_JAX["mask"],
    "backend": """"xla", "triton" for the kernels, through jax-triton, or "auto": the kernels where they run.
        Kernels draw other samples for a key than "xla" does, of the same law.""",
}
"""The arguments of their twins in `gapped.jax`."""
RETURNS = """A tensor of the shape and dtype of `logits` that carries the gradient. Its rows are one-hot if
    `hard`, else points of the simplex. Half precision is computed in float32 and rounded once."""
JAX_RETURNS = "An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode."


# The section of a docstring, and an entry of it.
_SECTION = re.compile(r"^Arguments:\n(?:    .*\n?)+", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): .*(?:\n     .*)*", re.MULTILINE)


def describing(arguments: Mapping[str, str], returns: str = "") -> Callable[[_T], _T]:
    """A decorator that describes the arguments which a docstring leaves out, in the order of the signature.

    A line of names, `(tau, hard)`, stands for them too. Functions with the argument `hard` return `returns`,
    unless they say otherwise.

    >>> @describing({"dim": "The category axis."})
    ... def f(logits, dim):
    ...     '''Add up.
    ...
    ...     Arguments:
    ...         logits: Any numbers.
    ...     '''
    >>> print(f.__doc__)
    Add up.
    <BLANKLINE>
    Arguments:
        logits: Any numbers.
        dim: The category axis.
    """

    def describe(name: str) -> str:
        text = f"{name}: {' '.join(arguments[name].split())}"
        return indent(fill(text, 100, subsequent_indent="    "), "    ")

    def describe_all(line: re.Match[str]) -> str:
        return "\n".join(map(describe, line[1].split(", ")))

    def documented(value: _T) -> _T:
        if not value.__doc__:  # there is none under python -OO
            return value
        text = re.sub(r"^    \(([\w, ]+)\)$", describe_all, cleandoc(value.__doc__), flags=re.MULTILINE)
        section, says_returns = _SECTION.search(text), "\nReturns:\n" in text
        own = {match[1]: match[0] for match in _ENTRY.finditer(section[0])} if section else {}
        order = dict.fromkeys((*signature(value).parameters, *own))
        names = [name for name in order if name in own or name in arguments]
        entries = "\n".join(own.get(name) or describe(name) for name in names)
        # A new section stands before what is returned, or behind the first line; at the end of a class.
        if section:
            before, after = text[: section.start()], text[section.end() :]
        elif isclass(value) or says_returns:
            before, mark, after = text.partition("\nReturns:\n")
            after = mark + after
        else:
            before, _, after = text.partition("\n\n")
            after = f"\n{after}"
        if returns and isfunction(value) and "hard" in names and not says_returns:
            returned = " ".join(returns.split())
            if "hard: True;" in own.get("hard", ""):
                returned = returned.replace("one-hot if `hard`, else points of the simplex", "one-hot")
            after = f"\nReturns:\n{indent(fill(returned, 106), '    ')}\n{after}"
        if entries:
            text = f"{before.rstrip()}\n\nArguments:\n{entries}\n{after}".rstrip()
        value.__doc__ = text
        return value

    return documented


documented = describing(ARGUMENTS, RETURNS)
"""A decorator of functions and classes of estimators: it fills in their docstrings."""
documented_in_jax = describing(JAX_ARGUMENTS, JAX_RETURNS)
"""The decorator of their twins in `gapped.jax`."""
