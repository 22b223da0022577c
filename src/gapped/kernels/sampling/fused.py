"""The description of an estimator that the kernels sample by, and when they can. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from gapped.kernels import backend, runner

AVERAGED = frozenset({"gumbel-rao", "reinmax-rao"})
"""The modes whose gradient is a mean over noise that is drawn once the category is known."""


@dataclass(frozen=True)
class Fused:
    """An estimator as the kernels know it."""

    mode: str
    """A key of `surrogates.MODES`."""
    tau: float | Tensor
    gap: float | Tensor | None = None
    """The gap of GST; None for Lemma 1's expected gap."""
    detach: bool = True
    """Whether GST's perturbation is a constant."""
    tau_forward: float | Tensor = 1.0
    samples: int = 1
    soft: bool = False
    """Whether the sample is the surrogate itself."""
    argmax: bool = False
    """Whether the largest logit decides the category."""

    @cached_property
    def levels(self) -> tuple[float | Tensor | None, ...]:
        """Temperature, gap and forward temperature."""
        return self.tau, self.gap, self.tau_forward

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The levels as numbers; 0 for one that is a tensor, or no gap."""
        # As floats: Triton compiles a kernel for the type, and would cut a later fraction to an integer.
        return tuple(
            0.0 if level is None or isinstance(level, Tensor) else float(level) for level in self.levels
        )

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The levels that are tensors."""
        return tuple(level for level in self.levels if isinstance(level, Tensor))

    def level_tensors(self, logits: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The levels as tensors, and how many consecutive rows share an entry of each.

        The logits stand in for a level that is a number; no rows share it, 0.
        """
        if not self.tensors:
            return (logits, logits, logits), (0, 0, 0)
        pairs = [
            backend.per_row(level, logits) if isinstance(level, Tensor) else (logits, 0)
            for level in self.levels
        ]
        tensors, every = zip(*pairs, strict=True)
        return tensors, every

    def at_argmax(self) -> Fused | None:
        """The same estimator given the category of the largest logit; None if that has no kernel."""
        if self.mode == "decoupled":
            return None
        # Gumbel-Rao draws Gumbel noise given its winner.
        given = "gumbel-rao" if self.mode == "gumbel-softmax" else self.mode
        return replace(self, mode=given, argmax=True)


def refusal(logits: Tensor, fused: Fused | None) -> str | None:
    """Why the kernels cannot sample these logits; None if they can."""
    if fused is None:
        return "this estimator, or this option of it, has no kernel"
    why_not = backend.unavailable(logits)
    if why_not is None and logits.shape[-1] > runner.LONGEST_BLOCK:
        if not fused.detach:
            return f"detach=False has no kernel for rows longer than {runner.LONGEST_BLOCK}"
        if fused.mode == "reinmax-rao":
            return f"ReinMax-Rao has no kernel for rows longer than {runner.LONGEST_BLOCK}"
    return why_not
