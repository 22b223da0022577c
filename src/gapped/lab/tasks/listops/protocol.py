"""Named protocols of ListOps: every constant that a published number depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gapped.errors import reject


@dataclass(frozen=True)
class Protocol:
    """One way to train and test the tree-LSTM."""

    name: str
    width: int = 300
    """Of word vectors, leaves, nodes, and the classifier's hidden layer."""
    dropout: float = 0.5
    """On word vectors, on the classifier's input and on its hidden layer."""
    count: int = 90_000
    """Training expressions drawn, before the long ones are left out."""
    max_tokens: int = 100
    """Expressions have fewer tokens, in all splits."""
    batch: int = 16
    learning_rate: float = 1e-3
    epochs: int = 20
    clip: float = 5.0
    """Largest norm of a run's gradient."""
    validations: int = 2
    """How often per epoch the validation accuracy is taken."""
    patience: int = 4
    """Validations without progress after which one more halves the learning rate."""
    waste: float = 0.1
    """Largest share of padding in a group of expressions of similar length."""


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            Protocol("paper"),
            Protocol(
                "short",
                width=48,
                dropout=0.1,
                count=10_000,
                max_tokens=12,
                batch=32,
                epochs=10,
                learning_rate=4e-3,
                waste=0.2,
            ),
            Protocol("tiny", width=8, dropout=0.1, count=200, max_tokens=12, epochs=1, batch=8, waste=0.3),
        )
    }
)


def protocol(name: str) -> Protocol:
    """The protocol called `name`."""
    if name not in PROTOCOLS:
        raise reject("protocol", name, f"one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
