"""ListOps with latent trees: the paper's last experiment. docs/listops.md describes it.

Expressions (`language`, `examples`, `source`) become batches of a fleet's `task`. Its `model` builds a `tree`
over each expression: `tables` and `sweep` compute it and its gradient in linear time. `variants` has the
estimators that only these recipes use, `spans` scores trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from gapped_lab.tasks import by_name


@dataclass(frozen=True)
class ListOpsProtocol:
    """One way to train and test the tree-LSTM."""

    name: str
    data: str = "listops"
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
    """Largest share of padding in a group of expressions of similar length; 1 puts all into one group."""
    characters: bool = False
    """Whether the model reads characters, spaces included, instead of tokens."""


_SHORT = ListOpsProtocol(
    "short",
    width=48,
    dropout=0.1,
    count=10_000,
    max_tokens=12,
    batch=32,
    epochs=10,
    learning_rate=4e-3,
    waste=0.2,
)
LISTOPS_PROTOCOLS: Mapping[str, ListOpsProtocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            ListOpsProtocol("paper"),
            # The paper's script reads characters, in batches of all lengths.
            ListOpsProtocol("authors", characters=True, waste=1.0),
            _SHORT,
            replace(_SHORT, name="authors-short", characters=True, waste=1.0, epochs=2),
            ListOpsProtocol(
                "tiny", width=8, dropout=0.1, count=200, max_tokens=12, epochs=1, batch=8, waste=0.3
            ),
        )
    }
)
listops_protocol = partial(by_name, LISTOPS_PROTOCOLS)
