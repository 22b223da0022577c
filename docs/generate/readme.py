"""What a user gains, in a number each: the table at the head of the README."""

from __future__ import annotations

from typing import Any

from evidence import Evidence
from field_board import standings
from study import DEFAULT, TASKS, Study
from vocabulary import LINEAR, cases

from gapped_lab.report.timings import REFERENCE, Timings, time, timings

FEWEST = 64
"""Categories of the rows that are quoted: shorter ones are bound by the host."""


def gains(evidence: Evidence) -> dict[str, Any]:
    """Numbers of the last runs on a GPU."""
    benches = [each for each in timings(evidence.bench) if not each.device.startswith("CPU")]
    large = [each for each in benches if not each.width and each.find("gumbel-softmax", "triton")]
    large = [each for each in large if each.reference("compiled") and _categories(each) >= FEWEST]
    ratios = [_ratios(each, "gumbel-softmax", "triton") for each in large]
    index = next(each for each in benches if each.width)
    by_index = [line for line in index.lines if (line.backend, line.form) == ("triton", "index")][-1]
    dense = index.find(REFERENCE, "eager")
    spent = time(by_index), time(dense)
    assert dense is not None
    assert dense.memory is not None
    assert by_index.memory is not None
    assert spent[0] is not None
    assert spent[1] is not None
    device = benches[0].device
    linear = {
        key: ways for key, ways in cases(evidence.linear)[device].items() if {LINEAR, "torch"} <= ways.keys()
    }
    rows, width, categories, _ = key = max(linear, key=lambda key: key[2])
    return {
        "study": _study(evidence),
        "board": _board(evidence),
        "device": device,
        "time": f"{min(t for t, _ in ratios):.2f} to {max(t for t, _ in ratios):.2f}",
        "memory": f"{max(m for _, m in ratios):.2f}",
        "sizes": f"{rows:,} × {width:,} × {categories:,}",
        "linear": f"{linear[key][LINEAR].memory:,.0f}",
        "torch": f"{linear[key]['torch'].memory:,.0f}",
        "index": f"{spent[0] / spent[1]:.2f}",
        "index_memory": f"{by_index.memory / dense.memory:.2f}",
        "index_shape": index.title,
    }


def _study(evidence: Evidence) -> str:
    """How far the default lies above the best cell of the study."""
    study = Study.of(evidence)
    task = study.worst(DEFAULT)
    return (
        f"{study.mean(DEFAULT):.1f}% above the best of {len(study.cells)} cells on average, "
        f"at most {study.shortfall(task, DEFAULT):.1f}% ({TASKS[task]})"
    )


def _board(evidence: Evidence) -> str:
    """The same on the board's VAEs, which have a network between choice and cost."""
    own = [each for each in standings(evidence) if not each.protocol.startswith("power-")]
    worst = max(own, key=lambda each: each.above)
    mean = sum(each.above for each in own) / len(own)
    return f"{mean:.1f}% on average over the board's {len(own)} VAEs, at most {worst.above:.1f}%"


def _categories(bench: Timings) -> int:
    return int(bench.title.split()[2].replace(",", ""))


def _ratios(bench: Timings, estimator: str, backend: str) -> tuple[float, float]:
    """Time and memory as fractions of torch's own sampler in eager mode."""
    ours, torchs = bench.find(estimator, backend), bench.find(REFERENCE, "eager")
    assert ours is not None
    assert torchs is not None
    spent = time(ours), time(torchs)
    assert spent[0] is not None
    assert spent[1] is not None
    assert ours.memory is not None
    assert torchs.memory is not None
    return spent[0] / spent[1], ours.memory / torchs.memory
