"""What a diagnosis recommends and how it is shown, from rows written by hand."""

from __future__ import annotations

import json
import math

import pytest

from gapped.diagnostics.diagnosis import Diagnosis, Row, error_at
from gapped.diagnostics.moments import Interval
from gapped.errors import GappedError


def row(label: str, bias: float | None, variance: float, evaluations: float | None = 1.0, **rest) -> Row:
    """Every interval is 0.01 wide to either side; without a bias there was no reference."""
    numbers = {"variance": variance, "seconds": 1e-6}
    if bias is not None:
        numbers |= {"bias": bias, "relative_bias": bias / 2, "mse": bias**2 + variance, "cosine": 0.5}
    values = dict.fromkeys(("bias", "relative_bias", "mse", "cosine")) | {
        name: Interval(value, value - 0.01, value + 0.01) for name, value in numbers.items()
    }
    return Row(label=label, samples=100, evaluations=evaluations, entries=12, **{**values, **rest})


def diagnosis(*rows: Row) -> Diagnosis:
    return Diagnosis(rows, "exact, by enumeration", Interval(2.0, 2.0, 2.0), 0.95)


A, B, UNBIASED = row("A", 0.5, 1.0), row("B", 0.0, 2.0), row("unbiased", 0.0, 1.1)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [A, B, UNBIASED],
            "Recommended: unbiased, with the lowest mean squared error at equal cost, 1 evaluation: "
            "1.1 [1.09, 1.11], below that of every other one (next A, 1.25 [1.24, 1.26]).",
        ),
        # The mean of four gradients of B costs as much as one of C.
        ([B, row("C", 0.0, 1.5, 4.0)], "Recommended: B, .* at equal cost, 4 evaluations: 0.5 "),
        ([UNBIASED, row("C", 0.0, 1.11)], "not decide: .* unbiased (1.1 .* cannot be told from C; more"),
        ([row("A", 0.0, 1.0, None), row("B", 0.0, 2.0, None)], "the lowest mean squared error: 1 "),
        (
            [row("A", None, 1.0), row("B", None, 2.0)],
            "lowest variance (no reference, so bias is not measured)",
        ),
        ([A, row("exact", 0.0, 0.0, enumerates=True)], "There is nothing to choose from"),
    ],
)
def test_the_recommendation(rows, sentence):
    for words in sentence.split(" .* "):
        assert words in diagnosis(*rows).recommendation


def test_the_error_at_equal_cost_averages_the_variance_alone():
    assert error_at(row("RLOO", 0.3, 1.0, 2.0), 8.0).value == pytest.approx(0.3**2 + 1 / 4)
    assert error_at(A, 1.0) == A.mse


def test_the_table_has_a_line_for_each_estimator():
    lines = str(diagnosis(A, UNBIASED)).splitlines()
    assert [line[:10] for line in (lines[0], *lines[2:4])] == ["estimator ", "A         ", "unbiased  "]
    assert "  0.5 [0.49, 0.51]  " in lines[2]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[-2].startswith("100 gradients each of 12 entries, 95% intervals; reference: exact, by enum")
    assert lines[-1].startswith("Recommended: unbiased")


def test_columns_that_were_not_measured_are_left_out():
    variances = diagnosis(row("A", None, 1.0), row("B", None, 2.0))
    assert "bias" not in str(variances).splitlines()[0]
    assert len(variances.plot().axes) == 1


def test_as_data_frame_figure_and_plain_values():
    endless = Interval(1.0, -math.inf, math.inf)
    both = diagnosis(A, row("B", 0.0, 1.0, per_parameter={"weight": 0.25}, seconds=endless))
    frame = both.to_pandas()
    assert list(frame.index) == ["A", "B"]
    assert frame.loc["A", "bias_low"] == A.bias.low
    assert frame.loc["B", "variance of weight"] == 0.25
    assert len(both.plot().axes) == 3
    record = json.loads(json.dumps(both.to_dict(), allow_nan=False))
    assert record["rows"][1]["seconds"] == {"value": 1.0, "low": None, "high": None}


def test_an_estimator_that_was_not_measured():
    with pytest.raises(GappedError, match="label: got 'nope', expected one of A, B"):
        diagnosis(A, B)["nope"]
