"""The sentences of a diagnosis and how it is shown, from rows written by hand."""

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


VANISHING = row("zero", 2.0, 1e-9, relative_norm=Interval(1e-9, 0.0, 1e-6))


@pytest.mark.parametrize(
    ("rows", "sentences"),
    [
        (
            [A, B, UNBIASED],
            [
                "No bias found: the 95% interval of the relative bias reaches 0. Its upper limit follows: B "
                "(0.01) and unbiased (0.01).",
                "Least relative bias: B, 0 [-0.01, 0.01], not separated from unbiased.",
                "Least variance of one gradient: A, 1 [0.99, 1.01].",
                "Least mean squared error at equal cost, 1 evaluation: unbiased, 1.1 [1.09, 1.11].",
            ],
        ),
        # The mean of four gradients of B costs as much as one of C.
        (
            [B, row("C", 0.0, 1.5, 4.0)],
            ["Least variance of one gradient: C", "at equal cost, 4 evaluations: B, 0.5 "],
        ),
        ([A, row("C", 0.6, 1.0)], ["Each has a bias: no 95% interval of the relative bias reaches 0."]),
        ([row("A", 0.0, 1.0, None), row("B", 0.0, 2.0, None)], ["Least mean squared error: A, 1 "]),
        (
            [A, UNBIASED, VANISHING],
            ["Vanishing gradient: zero. ", "Least variance of one gradient: A, ", "1 evaluation: unbiased, "],
        ),
        ([A, row("rodeo", 0.0, 1.5, trainable=True)], ["trains for less variance: rodeo."]),
    ],
)
def test_the_findings(rows, sentences):
    text = "\n".join(diagnosis(*rows).findings)
    for words in sentences:
        assert words in text
    assert ("variance_loss" in text) == any(row.trainable for row in rows)
    assert "Nothing is recommended" in text
    assert "`gapped compare` decides by training" in text


def test_a_vanishing_gradient_is_marked_and_least_in_nothing():
    both = diagnosis(A, VANISHING, row("exact", 0.0, 0.0, enumerates=True))
    assert "\nzero (vanishes) " in str(both)
    assert not any(sentence.startswith("Least") for sentence in both.findings)
    assert both.to_pandas()["vanishes"].tolist() == [False, True, False]
    assert both.to_dict()["rows"][1]["vanishes"]
    noisy = row("noisy", 2.0, 9.0, relative_norm=Interval(0.01, 0.0, 0.3))
    assert not noisy.vanishes, "it may be as much as 0.3"


def test_without_a_reference_the_variance_is_all_that_is_known():
    variances = Diagnosis((row("A", None, 1.0), row("B", None, 2.0)), "none", None, 0.95)
    first, second, _ = variances.findings
    assert first == "Bias is not measured: there is no reference."
    assert second == "Least variance of one gradient: A, 1 [0.99, 1.01]."
    assert "bias" not in str(variances).splitlines()[0]
    assert len(variances.plot().axes) == 1


def test_the_error_at_equal_cost_averages_the_variance_alone():
    assert error_at(row("RLOO", 0.3, 1.0, 2.0), 8.0).value == pytest.approx(0.3**2 + 1 / 4)
    assert error_at(A, 1.0) == A.mse


def test_the_table_shows_bias_first_and_a_line_for_each_estimator():
    lines = diagnosis(A, UNBIASED).text(120).splitlines()
    assert lines[0].split() == ["estimator", "relative", "bias", "variance", "MSE", "cosine", "evals", "µs"]
    assert [line[:10] for line in lines[2:4]] == ["A         ", "unbiased  "]
    assert "  0.25 [0.24, 0.26]  " in lines[2]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[5].startswith("100 gradients each of 12 entries, 95% intervals; reference: exact, by enum")


@pytest.mark.parametrize("width", range(40, 100))
def test_short_labels_leave_the_columns_their_room(width):
    assert max(map(len, diagnosis(A, B).text(width).splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_fit_the_width_and_break_between_words(width):
    name = "an estimator with a name that " + "is very " * 12 + "long"
    rows = [row(name, 0.5, 1234.5678), row("gumbel-rao:samples=10", 0.1, 1e-7), VANISHING]
    text = diagnosis(*rows).text(width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("relative bias", "variance", "MSE", "cosine", "evals", "µs", "gumbel-rao:samples=10"):
        assert word in text


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
