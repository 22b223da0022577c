"""The registry: estimators by name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal

from gapped.errors import GappedError, reject
from gapped.pathwise.base import Pathwise
from gapped.pathwise.decoupled import DecoupledGumbelSoftmax
from gapped.pathwise.gst import GST
from gapped.pathwise.gumbel import GumbelSoftmax
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.pathwise.reinmax import ReinMax
from gapped.pathwise.straight_through import StraightThrough
from gapped.score.arsm import ARSM
from gapped.score.base import Score
from gapped.score.disarm import DisARM
from gapped.score.disarm_tree import DisARMTree
from gapped.score.exact import Exact
from gapped.score.muprop import MuProp
from gapped.score.nvil import NVIL
from gapped.score.rebar import REBAR, RELAX
from gapped.score.reinforce import Reinforce
from gapped.score.rloo import RLOO
from gapped.score.sticks import DisARMSticks

Estimator = Pathwise | Score

_FAMILIES: Mapping[str, Mapping[str, type[Estimator]]] = MappingProxyType(
    {
        "pathwise": MappingProxyType(
            {
                "gumbel-softmax": GumbelSoftmax,
                "straight-through": StraightThrough,
                "gst": GST,
                "gumbel-rao": GumbelRao,
                "reinmax": ReinMax,
                "decoupled": DecoupledGumbelSoftmax,
            }
        ),
        "score": MappingProxyType(
            {
                "reinforce": Reinforce,
                "nvil": NVIL,
                "rloo": RLOO,
                "muprop": MuProp,
                "disarm": DisARM,
                "disarm-tree": DisARMTree,
                "disarm-sticks": DisARMSticks,
                "rebar": REBAR,
                "relax": RELAX,
                "arsm": ARSM,
                "exact": Exact,
            }
        ),
    }
)
_REGISTRY: Mapping[str, type[Estimator]] = MappingProxyType(
    {name: kind for members in _FAMILIES.values() for name, kind in members.items()}
)


def estimators(family: Literal["pathwise", "score"] | None = None) -> Mapping[str, type[Estimator]]:
    """All known estimators or those of one family, name to class, read-only.

    The sample of a *pathwise* estimator carries the gradient; a *score* estimator needs the costs of its
    samples, and is used through `gapped.expectation`.

    >>> "rloo" in estimators("score"), "rloo" in estimators("pathwise")
    (True, False)
    """
    if family is None:
        return _REGISTRY
    if family not in _FAMILIES:
        raise reject("family", family, f"one of {', '.join(_FAMILIES)}, or None for both")
    return _FAMILIES[family]


def estimator(name: str, **options: Any) -> Estimator:
    """The estimator called `name`, with its options checked.

    >>> estimator("gst", gap=1.2)
    GST(tau=1.0, hard=True, gap=1.2, detach=True)
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            accepted = f"one of {', '.join(known)}" if known else "none"
            raise GappedError(f"{name}: unknown option {option!r}, expected {accepted}")
    return _REGISTRY[name](**options)


def options_of(name: str) -> list[str]:
    """The options that the estimator called `name` has.

    >>> options_of("rloo")
    ['samples']
    """
    if name not in _REGISTRY:
        raise reject("estimator", name, f"one of {', '.join(sorted(_REGISTRY))}")
    return list(signature(_REGISTRY[name]).parameters)
