"""`gapped bench --work`: every way does the work that it is timed for; what is written and said about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import work_tables
from evidence import Evidence
from report_records import load_json
from test_bench import PAGE, TINY
from torch import Tensor
from torch.testing import assert_close
from training_toys import WORK as SMALL
from training_toys import one_line

import gapped
from gapped.cli.app import main
from gapped.comparison import records
from gapped_lab import bench
from gapped_lab.bench import jax_ways, torch_ways, workloads
from gapped_lab.bench.inputs import Inputs, attempt
from gapped_lab.bench.workloads import WORKLOADS, task, tasks
from gapped_lab.records import Timing, Work
from gapped_lab.report.timings import work_timings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IN_TORCH = [name for name in SMALL if name != "jax"]

pytestmark = pytest.mark.usefixtures("sandbox")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# The ways


@pytest.mark.parametrize("name", IN_TORCH)
def test_every_way_sends_a_gradient_to_every_input(name: str) -> None:
    problem = task(name, SMALL[name]).problem
    for way in problem.ways.values():
        leaves = [normal(*shape).requires_grad_() for shape in problem.inputs]
        result = way(*leaves)
        if problem.result is None:
            assert result.numel() == len(leaves[0])
            continue
        assert tuple(result.shape) == problem.result
        for gradient in torch.autograd.grad(result, leaves, normal(*problem.result)):
            assert gradient.abs().sum() > 0
    for part in problem.parts.values():
        assert tuple(part(*leaves).shape) == problem.logits


def test_the_recursion_has_the_gradient_of_gapped_subset() -> None:
    """Both go straight through the exact marginals, whatever was drawn."""
    logits, upstream = normal(3, 7).requires_grad_(), normal(3, 7)
    samples = torch_ways.recursion(logits, 3), gapped.subset(logits, 3)
    for sample in samples:
        assert_close(sample.detach().sum(-1), torch.full((3,), 3.0, dtype=torch.float64))
    gradients = [torch.autograd.grad(sample, logits, upstream) for sample in samples]
    assert_close(*gradients, rtol=0, atol=1e-10)
    certain = torch.tensor([[-60.0, 60, 0, 60]], dtype=torch.float64).requires_grad_()
    assert_close(torch_ways.recursion(certain, 2).detach(), torch.tensor([[0.0, 1, 0, 1]]).double())


# What is measured


def test_all_workloads_have_sizes_for_both_devices() -> None:
    assert list(SMALL) == list(WORKLOADS)
    for device in (CPU, CUDA):
        planned = tasks(["all"], device)
        assert list(dict.fromkeys(each.work for each in planned)) == list(WORKLOADS)
        assert all(each.cases for each in planned)
    full = {each.work: each for each in planned}
    assert full["vocabulary"].logits_bytes == 32768 * 50304 * 2
    assert full["gates"].logits_bytes == 4e8
    assert tasks(["rao", "gates", "rao"], CPU) == tasks(["gates", "rao"], CPU)


def test_inputs_take_turns_and_fill_more_than_a_cache() -> None:
    inputs = Inputs([(1024, 256), (256, 8)], (1024, 8), torch.float32, CPU)
    seen: list[int] = []

    def forward(logits: Tensor, table: Tensor) -> Tensor:
        seen.append(logits.data_ptr())
        return logits @ table

    call = inputs.call(forward)
    for _ in range(32):
        assert len(call()) == 2, "a gradient for each input"
    assert len(set(seen)) == 16
    assert seen[:16] == seen[16:]
    assert isinstance(inputs.call(forward, alone=True)(), Tensor)


@pytest.mark.parametrize("name", IN_TORCH)
def test_a_workload_is_measured(name: str) -> None:
    small = task(name, SMALL[name])
    (lines,) = bench.run([small], CPU, seconds=0.001)
    assert [line.way for line in lines] == list(small.cases)
    assert {line.status for line in lines} == {"ok"}
    for line in lines:
        assert line.milliseconds.median > 0
        assert line.memory >= line.gradients
    entries = sum(torch.Size(shape).numel() for shape in small.problem.inputs)
    assert lines[0].gradients == (0 if name == "decoding" else 8 * entries)


def test_what_does_not_fit_or_fails_loses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(gapped.GapMax, "choose_linear", broken)
    monkeypatch.setattr(workloads.F, "gumbel_softmax", too_large)
    (lines,) = bench.run([task("vocabulary", SMALL["vocabulary"])], CPU, seconds=0.001)
    assert [line.status for line in lines] == ["too large", "ok", "failed: RuntimeError: no kernel", "ok"]
    (work,) = work_timings(lines)
    assert work.reasons() == ["gapped.linear_choice: failed: RuntimeError: no kernel"]
    assert [row[1].text for row in work.table().rows][::2] == ["too large", "failed"]
    assert "× first" not in work.table().columns, "there is nothing to compare with"
    monkeypatch.setattr("gapped_lab.bench.works.Inputs", too_large)
    (lines,) = bench.run([task("gates", SMALL["gates"])], CPU, seconds=0.001)
    assert [line.status for line in lines] == ["too large"] * 3
    assert attempt(lambda: int("RESOURCE_EXHAUSTED"))[1] == "too large", "JAX's word"


def test_jax_samples_are_one_hot_and_both_results_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="needs jax")
    calls, prepare = [], jax_ways.JaxInputs.prepare

    def watched(inputs: jax_ways.JaxInputs, way: Any) -> Any:
        calls.append(prepare(inputs, way))
        return calls[-1]

    monkeypatch.setattr(jax_ways.JaxInputs, "prepare", watched)
    (lines,) = bench.run([task("jax", SMALL["jax"])], CPU, seconds=0.001)
    *lines, kernels = lines
    assert [line.way for line in lines] == ["Gumbel-softmax in jnp", "gapped.jax.gst, XLA"]
    assert kernels.status.startswith("not available: backend: got 'triton'")
    assert lines[0].environment["jax"] == jax.__version__
    for line, (call, memory) in zip(lines, calls, strict=True):
        assert (line.status, line.memory) == ("ok", memory)
        assert line.milliseconds.median > 0
        assert memory >= 2 * line.logits
        sample, gradient = call()
        assert_close(torch.tensor(sample.max(-1)), torch.ones(5))
        assert_close(torch.tensor(sample.sum(-1)), torch.ones(5))
        assert jax.numpy.abs(gradient).sum() > 0
        assert (call()[1] != gradient).any(), "other inputs, another key"


# The command


def test_the_command_writes_records_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    small = [task(name, SMALL[name]) for name in ("quantizer", "decoding")]
    monkeypatch.setattr(workloads, "tasks", lambda names, device: small)
    assert main([*TINY, "--work", "quantizer", "--work", "decoding", "--out", "here"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "quantizer, 3 × 2 × 5 × 4 f64: gradients 560 bytes" in printed
    assert "decoding, 5 × 4 × 11 f64: forward alone" in printed
    lines = load_json(tmp_path / "here" / "bench.jsonl")
    assert [line["kind"] for line in lines] == ["work"] * 7, "no shape, and no import"
    assert [line.to_json() for line in records.read(tmp_path / "here", Work)] == lines
    assert len({line["run"] for line in lines}) == 1
    assert main(["report", "here"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--work", "gate"],
            r"--work: got 'gate', expected all or one of quantizer,.*; did you mean gates\?",
        ),
        (["--work", "gates", "--estimator", "gst"], r"--work: workloads have their own estimators;"),
    ],
)
def test_a_user_error_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *arguments]) == 2
    assert re.search(message, one_line(capsys))


def test_help_and_page_name_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(WORKLOADS)}, or all" in text
    section = PAGE.read_text("utf-8").partition("## Workloads")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == list(WORKLOADS)


# The tables


def made_up(way: str, median: float | None, device: str = "NVIDIA H200", run: str = "a", **more: Any) -> Work:
    fields: dict[str, Any] = {"work": "gates", "sizes": [100_000_000], "dtype": "f32", "memory": 8 * 10**8}
    return Work(
        run=run,
        way=way,
        device_type="cpu" if device.startswith("CPU") else "cuda",
        environment={"device": device, "torch": "2.11.0", "commit": "0123456789ab"},
        status="too large" if median is None else "ok",
        milliseconds=None if median is None else Timing(median, median, 2 * median, 9),
        **{**fields, "logits": 4 * 10**8, "gradients": 4 * 10**8, **more},
    )


def test_ways_stand_beside_the_first() -> None:
    lines = [made_up("torch", 12.0, memory=4_480_000_000), made_up("ours", 0.6)]
    (work,) = work_timings([made_up("ours", 9.0, run="0"), *lines])
    assert (work.device, work.heading()) == ("NVIDIA H200", "gates, 100,000,000 f32: gradients 400 MB")
    assert [[entry.text for entry in row] for row in work.table().rows] == [
        ["torch", "12.0", "12.0 to 24.0", "1.00", "4.48 GB", "11.20"],
        ["ours", "0.600", "0.600 to 1.200", "0.05", "800 MB", "2.00"],
    ]
    sizes = [made_up("ours", 1.0, sizes=[4]), made_up("ours", 1.0, device="CPU, 2 threads")]
    assert len(work_timings([*lines, *sizes])) == 3


def test_the_page_says_what_is_not_measured_yet() -> None:
    cpu = made_up("ours", 1.0, device="CPU, 2 threads")
    gates, large = made_up("ours", 1.0), made_up("ours", None, work="masks", sizes=[25_000_000, 4])
    evidence = Evidence([], [], {}, [], [cpu, gates, large], [])
    values = work_tables(evidence)
    others = [name for name in WORKLOADS if name != "gates"]
    assert values["missing"] == f"{', '.join(others[:-1])} and {others[-1]}"
    assert values["tables"].count("### ") == 2
    assert "\n### NVIDIA H200, torch 2.11.0, gapped at 0123456789ab\n\ngates, 100,000,000" in values["tables"]


@pytest.mark.gpu
def test_events_time_a_workload_on_a_gpu() -> None:
    (lines,) = bench.run([task("gates", "1000000:f32")], CUDA, seconds=0.01)
    assert {line.status for line in lines} == {"ok"}
    assert lines[-1].memory <= 2.1 * lines[-1].logits
