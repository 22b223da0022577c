"""Descriptions of the arguments that all estimators share, each written once."""

from __future__ import annotations

from gapped.docstrings import describing

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


documented = describing(ARGUMENTS)
"""A decorator of functions and classes of estimators: it fills in their docstrings."""
