"""The public names, each once: type checkers, `gapped/__init__.py` and the registry read this file."""

from typing import Any, Literal, overload

from gapped import counts as counts
from gapped import distributions as distributions
from gapped import nn as nn
from gapped import simplex as simplex
from gapped import subsets as subsets
from gapped._version import __version__ as __version__
from gapped.checks import backend_used as backend_used
from gapped.choice import Choice as Choice
from gapped.choices import Choices as Choices
from gapped.comparison.compare import compare as compare
from gapped.comparison.outcome import Comparison as Comparison
from gapped.diagnostics import diagnose as diagnose
from gapped.diagnostics import diagnose_model as diagnose_model
from gapped.diagnostics.diagnosis import Diagnosis as Diagnosis
from gapped.diagnostics.surrogate_properties import properties as properties
from gapped.drop_in import replacing_torch as replacing_torch
from gapped.errors import GappedError as GappedError
from gapped.gates import gate as gate
from gapped.objective import expectation as expectation
from gapped.pathwise import Pathwise as Pathwise
from gapped.pathwise.decoupled import DecoupledGumbelSoftmax as DecoupledGumbelSoftmax
from gapped.pathwise.decoupled import decoupled_gumbel_softmax as decoupled_gumbel_softmax
from gapped.pathwise.gapmax import GapMax as GapMax
from gapped.pathwise.gapmax import gapmax as gapmax
from gapped.pathwise.gst import GST as GST
from gapped.pathwise.gst import gst as gst
from gapped.pathwise.gumbel_rao import GumbelRao as GumbelRao
from gapped.pathwise.gumbel_rao import gumbel_rao as gumbel_rao
from gapped.pathwise.gumbel_softmax import GumbelSoftmax as GumbelSoftmax
from gapped.pathwise.gumbel_softmax import gumbel_softmax as gumbel_softmax
from gapped.pathwise.mve import MVE as MVE
from gapped.pathwise.mve import mve as mve
from gapped.pathwise.reinmax import ReinMax as ReinMax
from gapped.pathwise.reinmax import reinmax as reinmax
from gapped.pathwise.reinmax_rao import ReinMaxRao as ReinMaxRao
from gapped.pathwise.reinmax_rao import reinmax_rao as reinmax_rao
from gapped.pathwise.straight_through import StraightThrough as StraightThrough
from gapped.pathwise.straight_through import straight_through as straight_through
from gapped.registry import estimator as _estimator  # noqa: F401, its types are below
from gapped.registry import estimators as estimators
from gapped.rollouts import Rollout as Rollout
from gapped.rollouts import rollout as rollout
from gapped.sampling import choose as choose
from gapped.sampling import sample as sample
from gapped.score import Score as Score
from gapped.score.arsm import ARSM as ARSM
from gapped.score.disarm import DisARM as DisARM
from gapped.score.disarm import DisARMSticks as DisARMSticks
from gapped.score.disarm import DisARMTree as DisARMTree
from gapped.score.double_cv import DoubleCV as DoubleCV
from gapped.score.exact import Exact as Exact
from gapped.score.muprop import MuProp as MuProp
from gapped.score.nvil import NVIL as NVIL
from gapped.score.rebar import REBAR as REBAR
from gapped.score.rebar import RELAX as RELAX
from gapped.score.reinforce import RLOO as RLOO
from gapped.score.reinforce import Reinforce as Reinforce
from gapped.score.rodeo import RODEO as RODEO
from gapped.simplex import expected_gap as expected_gap
from gapped.simplex import unimix as unimix
from gapped.subsets.subset_sampling import nm_mask as nm_mask
from gapped.subsets.subset_sampling import subset as subset
from gapped.vocabulary import LinearChoice as LinearChoice
from gapped.vocabulary import linear_choice as linear_choice

_HOME: dict[str, str]

_Pathwise = Literal[
    "decoupled",
    "gapmax",
    "gst",
    "gumbel-rao",
    "gumbel-softmax",
    "mve",
    "reinmax",
    "reinmax-rao",
    "straight-through",
]
_Score = Literal[
    "arsm",
    "disarm",
    "disarm-sticks",
    "disarm-tree",
    "double-cv",
    "exact",
    "muprop",
    "nvil",
    "rebar",
    "relax",
    "rloo",
    "reinforce",
    "rodeo",
]

# A text with options can be of either family: only names alone say which.
@overload
def estimator(text: _Pathwise, **options: Any) -> Pathwise: ...
@overload
def estimator(text: _Score, **options: Any) -> Score: ...
@overload
def estimator(text: str, **options: Any) -> Pathwise | Score: ...
