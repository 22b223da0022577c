"""Estimators for Optuna: which one, and at which temperature, as parameters of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optuna.trial import BaseTrial

from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.pathwise.gapmax import GapMax
from gapped.registry import resolve


def suggest(
    trial: BaseTrial,
    estimators: Sequence[str] = ("gapmax", "gst:gap=auto", "gumbel-softmax", "straight-through"),
    tau: tuple[float, float] | None = (0.1, 2.0),
    *,
    name: str = "estimator",
) -> Pathwise:
    """A pathwise estimator whose text, and whose temperature, Optuna chooses.

    Arguments:
        trial: The trial that the objective was called with.
        estimators: Texts to choose from; those that name a temperature keep it.
        tau: The range of the temperature, searched on a logarithmic scale; None leaves it to the texts.
        name: The name of the parameter; the temperature is `name.tau`. Each choice of a model needs its own.

    Returns:
        The estimator, for `gapped.sample(logits, estimator)` and everything else that takes one.

    GapMax, the default of the package, has nothing to tune; in the list it is what the others have to beat.

    >>> from optuna.trial import FixedTrial
    >>> suggest(FixedTrial({"estimator": "gst:gap=auto", "estimator.tau": 0.7}))
    GST(tau=0.7, hard=True, draw='sample', gap='auto', detach=True)
    """
    text = str(trial.suggest_categorical(name, list(estimators)))
    estimator = resolve(text)
    if not isinstance(estimator, Pathwise):
        raise reject("estimators", text, "pathwise estimators; others go into gapped.expectation")
    if tau is None or "tau=" in text or isinstance(estimator, GapMax):
        return estimator
    return replace(estimator, tau=trial.suggest_float(f"{name}.tau", *tau, log=True))
