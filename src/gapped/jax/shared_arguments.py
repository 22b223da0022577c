"""Descriptions of the arguments that all estimators share, each written once."""

from __future__ import annotations

from gapped.docstrings import describing

ARGUMENTS = {
    "key": "A random key, such as `jax.random.key(0)`.",
    "logits": """Unnormalised log-probabilities θ of any floating dtype and shape, the K categories on the
        axis `axis`; each vector along it is a row. A category with the logit -inf does not exist. A row with
        a NaN or +inf gives NaN.""",
    "tau": """Temperature τ of the gradient: a positive number, or an array that broadcasts against the
        logits' shape without the category axis. It does not change the law of hard samples, and gets no
        gradient itself.""",
    "hard": """True returns one-hot vectors, False the surrogate itself, a point of the simplex. Both have
        the same gradient.""",
    "axis": "The category axis.",
    "where": """Booleans that broadcast against the logits, with all of their axes where `axis` is not the
        last one. A category where it is False does not exist: no mass, no gradient.""",
    "backend": """"xla", "triton" for the kernels, through jax-triton, or "auto": the kernels where they run.
        Kernels draw other samples for a key than "xla" does, of the same law.""",
}

documented = describing(ARGUMENTS)
"""A decorator of functions and classes of estimators: it fills in their docstrings."""
