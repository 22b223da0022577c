"""gapped: categorical samples that carry a gradient.

>>> import torch, gapped
>>> logits = torch.randn(4, 10, requires_grad=True)
>>> z = gapped.gst(logits, tau=0.5, hard=True)
>>> z.sum(-1)
tensor([1., 1., 1., 1.], grad_fn=<SumBackward1>)

The names below are loaded on first use, so that what needs no torch (the command line's help, the report)
does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gapped._version import __version__

if TYPE_CHECKING:
    from gapped import distributions, nn, simplex
    from gapped.diagnostics.diagnosis import Diagnosis
    from gapped.diagnostics.measure import diagnose, diagnose_model
    from gapped.diagnostics.properties import properties
    from gapped.errors import GappedError
    from gapped.kernels.launch import backend_used
    from gapped.objective import expectation
    from gapped.pathwise.base import Pathwise
    from gapped.pathwise.decoupled import DecoupledGumbelSoftmax, decoupled_gumbel_softmax
    from gapped.pathwise.gst import GST, gst, gst_index
    from gapped.pathwise.gumbel import GumbelSoftmax, gumbel_softmax
    from gapped.pathwise.gumbel_rao import GumbelRao, gumbel_rao
    from gapped.pathwise.reinmax import ReinMax, reinmax
    from gapped.pathwise.straight_through import StraightThrough, straight_through
    from gapped.registry import estimator, estimators
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
    from gapped.simplex import expected_gap

__all__ = [
    "ARSM",
    "GST",
    "NVIL",
    "REBAR",
    "RELAX",
    "RLOO",
    "DecoupledGumbelSoftmax",
    "Diagnosis",
    "DisARM",
    "DisARMSticks",
    "DisARMTree",
    "Exact",
    "GappedError",
    "GumbelRao",
    "GumbelSoftmax",
    "MuProp",
    "Pathwise",
    "ReinMax",
    "Reinforce",
    "Score",
    "StraightThrough",
    "__version__",
    "backend_used",
    "decoupled_gumbel_softmax",
    "diagnose",
    "diagnose_model",
    "distributions",
    "estimator",
    "estimators",
    "expectation",
    "expected_gap",
    "gst",
    "gst_index",
    "gumbel_rao",
    "gumbel_softmax",
    "nn",
    "properties",
    "reinmax",
    "simplex",
    "straight_through",
]

_HOME = {
    name: module
    for module, names in {
        "diagnostics.diagnosis": ["Diagnosis"],
        "diagnostics.measure": ["diagnose", "diagnose_model"],
        "diagnostics.properties": ["properties"],
        "errors": ["GappedError"],
        "kernels.launch": ["backend_used"],
        "objective": ["expectation"],
        "pathwise.base": ["Pathwise"],
        "pathwise.decoupled": ["DecoupledGumbelSoftmax", "decoupled_gumbel_softmax"],
        "pathwise.gst": ["GST", "gst", "gst_index"],
        "pathwise.gumbel": ["GumbelSoftmax", "gumbel_softmax"],
        "pathwise.gumbel_rao": ["GumbelRao", "gumbel_rao"],
        "pathwise.reinmax": ["ReinMax", "reinmax"],
        "pathwise.straight_through": ["StraightThrough", "straight_through"],
        "registry": ["estimator", "estimators"],
        "score.arsm": ["ARSM"],
        "score.base": ["Score"],
        "score.disarm": ["DisARM"],
        "score.disarm_tree": ["DisARMTree"],
        "score.exact": ["Exact"],
        "score.muprop": ["MuProp"],
        "score.nvil": ["NVIL"],
        "score.rebar": ["REBAR", "RELAX"],
        "score.reinforce": ["Reinforce"],
        "score.rloo": ["RLOO"],
        "score.sticks": ["DisARMSticks"],
        "simplex": ["expected_gap"],
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"gapped.{_HOME[name]}"), name)
    elif name in __all__:
        value = import_module(f"gapped.{name}")
    else:
        raise AttributeError(f"module 'gapped' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
