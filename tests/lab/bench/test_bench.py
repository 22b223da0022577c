"""`gapped bench`: what it measures, writes and says. No test looks at a real time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from report_records import load_json
from training_toys import one_line

import gapped
from gapped.cli.app import main
from gapped.comparison import records
from gapped_lab import bench
from gapped_lab.bench import cases as jobs
from gapped_lab.bench import timing
from gapped_lab.records import Bench, Startup, Timing, Work
from gapped_lab.report.timings import (
    Timings,
    bench_figure,
    losses,
    ratio,
    table_of,
    timings,
)

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
TINY = ["bench", "--device", "cpu", "--no-compiled", "--seconds", "0.001"]


pytestmark = pytest.mark.usefixtures("sandbox")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a GPU can be made without one."""
    monkeypatch.setattr(jobs, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(jobs, "find_spec", lambda name: object())


def made_up(
    estimator: str,
    backend: str,
    median: float | None,
    shape: str = "1048576x64:f32",
    run: str = "2030-01-01T00:00:00+00:00",
    device: str = "NVIDIA H200",
    memory: float = 2.0,
    form: str = "sample",
) -> Bench:
    """A record with round numbers."""
    size = jobs.parse_shape(shape)
    return Bench(
        run=run,
        device_type="cpu" if device.startswith("CPU") else "cuda",
        environment={"device": device, "torch": "2.11.0", "commit": "0123456789ab"},
        shape=shape,
        rows=size.rows,
        categories=size.categories,
        width=size.width,
        dtype=size.dtype,
        copy=Timing(0.2, 0.2, 0.2, 9),
        estimator=estimator,
        backend=backend,
        form=form,
        status="too large" if median is None else "ok",
        milliseconds=None if median is None else Timing(median, median, 2 * median, 9),
        memory=None if median is None else memory,
    )


def documented_fields() -> set[str]:
    """The fields of records that the page explains."""
    section = PAGE.read_text("utf-8").partition("## The records")[2]
    return set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M))))


def test_every_field_of_a_record_is_explained() -> None:
    fields = {each.name for kind in (Bench, Startup, Work) for each in dataclasses.fields(kind)}
    assert documented_fields() == fields | {"schema", "kind"}


LINES = [
    made_up("F.gumbel_softmax", "eager", 4.0, memory=5.0),
    made_up("F.gumbel_softmax", "compiled", 2.0),
    made_up("gst", "torch", 3.0),
    made_up("gst", "triton", 0.5),
    made_up("gumbel-rao:samples=1000", "torch", None),
]


# What is measured


def test_the_default_plan_for_a_gpu(roomy: None) -> None:
    for shapes in jobs.DEFAULT.values():
        assert [str(jobs.parse_shape(text)) for text in shapes] == list(shapes)
    planned = {str(job.shape): job.cases for job in jobs.plan(CUDA)}
    for cases in planned.values():
        assert [c.backend for c in cases[:2]] == ["eager", "compiled"]
        assert {c.backend for c in cases[2:]} == {"torch", "triton"}
    forms = {case.form for case in planned["8192x128256x1024:bf16"]}
    assert forms == {"dense", "index"}


def test_what_is_named_replaces_the_default(roomy: None) -> None:
    (job,) = jobs.plan(CUDA, ["40x5"], ["gst:gap=1.2"], ["triton", "triton"], compiled=False)
    assert job.shape == jobs.Shape(40, 5)
    assert job.cases == (jobs.Case("F.gumbel_softmax", "eager"), jobs.Case("gst:gap=1.2", "triton"))
    assert {case.backend for job in jobs.plan(CPU) for case in job.cases} == {"eager", "compiled", "torch"}


def test_calls_take_turns_and_are_summarised() -> None:
    """With a clock that is ours: the order of batches, how many of each, and the quantiles."""
    order: list[str] = []
    pace = {"quick": 0.01, "slow": 0.04, "long": 1.0}
    calls = {name: (lambda name=name: name) for name in pace}

    def tick(call: timing.Call, count: int, is_long: bool) -> float:
        order.append(f"{call()} {count}" + " alone" * is_long)
        return pace[str(call())]

    measured = timing.interleaved(calls, timing.Clock(tick, 0.02, lead=2), seconds=0.5)
    assert order[:7] == ["quick 1"] * 3 + ["slow 1"] * 3 + ["long 1"]
    # 0.5 s hold 12 batches of 2 + 2 calls of 10 ms, and 4 of 1 + 2 calls of 40 ms.
    rounds = ["quick 2", "slow 1", "long 1 alone"]
    assert order[7:] == rounds * 3 + rounds[:2] + ["quick 2"] * 8
    assert measured == {
        "quick": timing.Timing(10.0, 10.0, 10.0, 12),
        "slow": timing.Timing(40.0, 40.0, 40.0, 4),
        "long": timing.Timing(1000.0, 1000.0, 1000.0, 3),
    }


def test_peak_memory_is_what_a_call_holds_at_once() -> None:
    def call() -> None:
        first = torch.empty(1000)
        second = torch.empty(1000)
        del first
        torch.empty(500), second

    assert timing.peak_memory(call, CPU) == 8000


def test_what_does_not_fit_is_too_large_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logits take 800 bytes; a hundred draws more than this.
    monkeypatch.setattr(bench, "free_memory", lambda device: 2**18)
    planned = jobs.plan(CPU, ["40x5"], ["gst", "gumbel-rao:samples=100"], compiled=False)
    (lines,) = bench.run(planned, CPU, seconds=0.001)
    status = {line.estimator: line.status for line in lines}
    assert status == {"F.gumbel_softmax": "ok", "gst": "ok", "gumbel-rao:samples=100": "too large"}
    assert lines[-1].milliseconds is lines[-1].memory is None


def test_an_error_loses_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(gapped.ReinMax, "sample", broken)
    shape = ["--shape", "40x5", "--estimator", "reinmax", "--estimator", "gst"]
    assert main([*TINY, *shape]) == 1
    printed = capsys.readouterr()
    assert printed.err == "gapped: 1 of the measurements failed, for the reasons above\n"
    assert "reinmax, torch, sample: failed: RuntimeError: two lines" in printed.out
    statuses = [line.status for line in records.read(Path("runs/bench"), Bench)]
    assert statuses == ["ok", "failed: RuntimeError: two lines", "ok"]


# The command


def test_the_command_writes_records_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [*TINY, "--shape", "40x5:bf16", "--estimator", "gst:gap=1.2", "--out", "here"]
    assert main(call) == 0
    printed = capsys.readouterr().out
    assert "40 × 5 bf16" in printed
    assert "gst:gap=1.2" in printed
    lines = load_json(tmp_path / "here" / "bench.jsonl")
    assert [(one["estimator"], one["backend"]) for one in lines] == [
        ("F.gumbel_softmax", "eager"),
        ("gst:gap=1.2", "torch"),
    ]
    for line in lines:
        assert set(line) == {"schema", "kind", *(each.name for each in dataclasses.fields(Bench))}
        assert (line["schema"], line["kind"], line["status"]) == (1, "bench", "ok")
        assert set(line["milliseconds"]) == set(line["copy"]) == {"median", "low", "high", "batches"}
        assert line["memory"] >= 2
        assert {"device", "torch", "commit"} <= set(line["environment"])
        assert line["run"] == lines[0]["run"]
    svg = (tmp_path / "here" / "bench.svg").read_text("utf-8")
    assert svg == bench_figure(records.read(tmp_path / "here", Bench))
    assert main(["report", "here"]) == 0
    assert "gst:gap=1.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "40"], r"--shape: got '40', expected ROWSxCATEGORIES"),
        (["--shape", "40x0"], r"--shape: got '40x0'"),
        (["--shape", "40x5:int8"], r"--shape: got '40x5:int8'.*bf16"),
        (["--shape", "9000000x9000000"], r"--shape: .* fits; this one needs .* GiB"),
        (["--backend", "cuda"], r"--backend: got 'cuda', expected one of torch, triton"),
        (["--backend", "triton"], r"--backend: got 'triton', expected torch on a cpu"),
        (["--estimator", "gts"], r"estimator: got 'gts'"),
        (["--seconds", "0"], r"--seconds: got 0.0, expected a positive number"),
        (["--seconds", "nan"], r"--seconds: got nan"),
        (["--device", "tpu"], r"device: got 'tpu'"),
        (["--out", "file"], r"cannot write here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*TINY, *arguments]) == 2
    assert re.search(message, one_line(capsys))
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_bench_keeps_the_shapes_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[list[records.Bench]]:
        yield LINES
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    assert main([*TINY, "--shape", "40x5", "--out", "here"]) == 130
    assert "what was measured is in here" in capsys.readouterr().err
    assert records.read(tmp_path / "here", Bench) == LINES


def test_importing_is_measured_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout = "0.059\n"

    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: Done())
    startups = bench.startup(CPU)
    assert [startup.what for startup in startups] == list(bench.IMPORTS)
    assert {startup.milliseconds.median for startup in startups} == {59.0}


# The tables


def test_ratios_and_the_floor() -> None:
    (shape,) = timings(LINES)
    assert (shape.copy, shape.floor) == (0.2, 0.5)
    for other in ("3000x10:f32", "8192x128256x64:bf16"):  # memory is not the limit
        assert timings([made_up("gst", "triton", 1.0, other)])[0].floor is None
    rows = {(r[0].text, r[1].text): [e.text for e in r[2:]] for r in table_of(shape).rows}
    assert table_of(shape).columns[2:] == ("ms", "10% to 90%", "× eager", "× compiled", "× floor", "memory")
    assert rows["gst", "triton"] == ["0.500", "0.500 to 1.000", "0.12", "0.25", "1.00", "2.00"]
    assert rows["F.gumbel_softmax", "eager"] == ["4.000", "4.000 to 8.000", "1.00", "2.00", "8.00", "5.00"]
    assert rows["gumbel-rao:samples=1000", "torch"] == ["too large", "–", "–", "–", "–", "–"]
    assert ratio(1.0, 0.0) is ratio(None, 1.0) is None


def test_a_line_says_where_torch_is_faster() -> None:
    """Than the first estimator, by its faster backend; torch may be compiled."""
    small = [made_up(*each, shape="32x10:f32") for each in (("F.gumbel_softmax", "eager", 2.0),)]
    small += [made_up("gapmax", "torch", 3.0, "32x10:f32"), made_up("gst", "torch", 1.0, "32x10:f32")]
    shapes = timings([*LINES, *small])
    assert losses(shapes) == "torch is faster at: 32 × 10 f32 (gapmax: 1.50 × the time)"
    assert losses(shapes[:1]) == "torch is faster at: none"


def test_ratios_stay_inside_one_run() -> None:
    """A later run of another shape, or on another device, replaces nothing; one of the same replaces all."""
    later = "2031-01-01T00:00:00+00:00"
    other = [
        made_up("gst", "triton", 1.0, "3000x10:f32", later),
        made_up("gst", "torch", 1.0, run=later, device="CPU, 2 threads"),
    ]
    assert timings(LINES + other)[0] == timings(LINES)[0]
    again = made_up("gst", "triton", 1.0, run=later)
    for lines in ([*LINES, again], [again, *LINES]):
        assert timings(lines) == [Timings("NVIDIA H200", "1048576x64:f32", (again,))]
    (row,) = table_of(timings([*LINES, again])[0]).rows
    assert [e.text for e in row] == ["gst", "triton", "1.000", "1.000 to 2.000", "2.00", "2.00"], "no × eager"
