"""Errors of `gapped.jax`, as shapes and dtypes tell: one line each."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from jax_problems import _quick_compilation, jax  # noqa: F401

import gapped.jax
from gapped.jax import GappedError

jnp = jax.numpy
KEY = jax.random.key(0)
INF, NAN = math.inf, math.nan

LOGITS = np.zeros((4, 3), np.float32)
BAD: list[tuple[str, Any]] = [
    ("key: got a float32 array", lambda: gapped.jax.gst(LOGITS, KEY)),
    ("key: got an object of type int", lambda: gapped.jax.gst(0, LOGITS)),
    ("logits: got a int32 array", lambda: gapped.jax.gst(KEY, LOGITS.astype(np.int32))),
    ("logits: got an object of type list", lambda: gapped.jax.gst(KEY, [0.0, 1.0])),
    ("logits: got a float32 array of shape ()", lambda: gapped.jax.gst(KEY, np.zeros((), np.float32))),
    ("logits: got a float32 array of shape (4, 0)", lambda: gapped.jax.gst(KEY, LOGITS[:, :0])),
    ("axis: got 2", lambda: gapped.jax.gst(KEY, LOGITS, axis=2)),
    ("where: got a float32 array", lambda: gapped.jax.gst(KEY, LOGITS, where=LOGITS)),
    ("where: got a bool array of shape (4,)", lambda: gapped.jax.gst(KEY, LOGITS, where=LOGITS[:, 0] == 0)),
    ("where: got a bool array", lambda: gapped.jax.gst(KEY, LOGITS, axis=0, where=LOGITS[0] == 0)),
    ("tau: got a float32 array of shape (3,)", lambda: gapped.jax.gst(KEY, LOGITS, LOGITS[0])),
    ("tau: got a bool array", lambda: gapped.jax.gst(KEY, LOGITS, LOGITS[:, 0] == 0)),
    *((f"tau: got {tau!r}", lambda tau=tau: gapped.jax.gst(KEY, LOGITS, tau)) for tau in (0, -1.0, NAN, "x")),
    *((f"gap: got {gap!r}", lambda gap=gap: gapped.jax.gst(KEY, LOGITS, gap=gap)) for gap in (-1, INF, "x")),
    ("gap: got a function whose result", lambda: gapped.jax.gst(KEY, LOGITS, gap=lambda p: p[:2])),
    ("hard: got False", lambda: gapped.jax.reinmax(KEY, LOGITS, 1.0, False)),
    ("hard: got 1", lambda: gapped.jax.gst(KEY, LOGITS, 1.0, 1)),
    ("samples: got 0", lambda: gapped.jax.gumbel_rao(KEY, LOGITS, samples=0)),
    ("tau_forward: got 0", lambda: gapped.jax.decoupled_gumbel_softmax(KEY, LOGITS, tau_forward=0)),
    ("samples: got 1", lambda: gapped.jax.RLOO(1)),
    ("alpha: got 'x', expected a finite number", lambda: gapped.jax.DoubleCV(alpha="x")),
    ("alpha: got nan, expected a finite number", lambda: gapped.jax.DoubleCV(2, NAN)),
    ("alpha: got -inf, expected a finite number", lambda: gapped.jax.DoubleCV(2, -INF)),
    ("alpha: got 1e+39, expected a finite number", lambda: gapped.jax.DoubleCV(2, 1e39)),
    ("tau: got 10000", lambda: gapped.jax.GST(10**400)),
    ("alpha: got 10000", lambda: gapped.jax.DoubleCV(2, 10**400)),
    ("alpha: got True, expected a finite number", lambda: gapped.jax.DoubleCV(2, True)),
    ("estimator: got 'gts'; did you mean gst? Expected one of", lambda: gapped.jax.estimator("gts")),
    ("gst: unknown option 'gab'", lambda: gapped.jax.estimator("gst:gab=1")),
    ("estimator: got RLOO", lambda: gapped.jax.gate(KEY, LOGITS, estimator=gapped.jax.RLOO())),
    ("table: got a float32 array", lambda: gapped.jax.choose(KEY, LOGITS).select(LOGITS)),
    ("amount: got 2", lambda: gapped.jax.unimix(LOGITS, 2)),
    ("f: got costs of shape (2,)", lambda: gapped.jax.expectation(KEY, lambda z: z[0, :2, 0], LOGITS, "gst")),
    ("f: got costs of shape ()", lambda: gapped.jax.expectation(KEY, jnp.sum, LOGITS, "rloo")),
    ("f: got an object of type int", lambda: gapped.jax.expectation(KEY, 3, LOGITS, "rloo")),
    (
        "Exact: got 12 variables of 3 categories",
        lambda: gapped.jax.expectation(KEY, lambda z: z.sum((-1, -2)), jnp.zeros((12, 3)), "exact"),
    ),
    ("RLOO.sample: a score-function estimator", lambda: gapped.jax.RLOO().sample(KEY, LOGITS)),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_one_line(message: str, call: Any) -> None:
    with pytest.raises(GappedError, match=re.escape(message)) as caught:
        jax.eval_shape(call) if "array" in message else call()
    assert "\n" not in str(caught.value)
