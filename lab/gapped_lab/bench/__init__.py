"""Time and memory of samplers and workloads beside torch's own, as `gapped bench` measures them.

The cases of one shape, and the ways of one workload, are measured together, in turns, so that their ratios
mean something.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.comparison.runs import describe
from gapped.pathwise import Pathwise
from gapped_lab.bench.cases import DTYPES, REFERENCE, Case, Job, Shape
from gapped_lab.bench.inputs import Inputs, attempt
from gapped_lab.bench.jax_ways import installed_version
from gapped_lab.bench.timing import CLOCKS, Call, free_memory, interleaved, quantiles
from gapped_lab.bench.workloads import Task
from gapped_lab.bench.works import measure_work
from gapped_lab.estimator_text import make, parse
from gapped_lab.records import Bench, Startup, Work

IMPORTS = {"import gapped": "import gapped", "import gapped; gapped.gst": "import gapped; gapped.gst"}


def run(
    jobs: Sequence[Job | Task],
    device: torch.device,
    seconds: float = 0.5,
    watch: Callable[[str], None] = lambda _: None,
    constants: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Sequence[Bench | Work]]:
    """Measure the jobs, one list of lines for each as it is done; `constants` are those that were changed."""
    common = _common(device)
    common["environment"] |= constants
    for job in jobs:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(job, Task):
            lines = measure_work(job, device, seconds, watch)
            versions = {"jax": installed_version()} if job.problem.jax else {}
            environment = {**common["environment"], **versions}
            yield [Work(**{**common, "environment": environment}, **line) for line in lines]
            continue
        if any(case.backend == "compiled" for case in job.cases):
            # Compiled code is cached by function, up to a limit: each shape starts afresh.
            torch.compiler.reset()
        yield [Bench(**common, **line) for line in _measure(job, device, seconds, watch)]


def startup(device: torch.device, repeats: int = 3) -> list[Startup]:
    """What importing the package costs after torch: the median over fresh processes."""
    common = _common(device)
    lines = []
    for name, statement in IMPORTS.items():
        code = f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        command = [sys.executable, "-c", code]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(repeats)]
        timing = quantiles([1e3 * float(run.stdout) for run in runs])
        lines.append(Startup(**common, what=name, milliseconds=timing))
    return lines


def _common(device: torch.device) -> dict[str, Any]:
    # The precision of matrix products is a setting of training that is not in effect here.
    environment = {key: value for key, value in describe(device).items() if key != "precision"}
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {"run": began, "device_type": device.type, "environment": environment}


def _measure(
    job: Job, device: torch.device, seconds: float, watch: Callable[[str], None]
) -> list[dict[str, Any]]:
    shape = job.shape
    leaves = [(shape.rows, shape.categories), *([(shape.categories, shape.width)] if shape.width else [])]
    inputs = Inputs(leaves, (shape.rows, shape.width or shape.categories), DTYPES[shape.dtype], device)
    calls: dict[str, Call] = {"copy": inputs.copy()}
    lines: dict[str, dict[str, Any]] = {}
    for case in job.cases:
        watch(f"{shape}  {case.estimator} {case.backend}")
        call, result = _prepare(case, shape, inputs)
        if call is not None:
            calls[str(case)] = call
        lines[str(case)] = {**asdict(case), **result}
    watch(f"{shape}  timing")
    times = interleaved(calls, CLOCKS[device.type], seconds)
    common = {"shape": str(shape), **asdict(shape), "copy": times["copy"]}
    return [{**common, **line, "milliseconds": times.get(name)} for name, line in lines.items()]


def _prepare(case: Case, shape: Shape, inputs: Inputs) -> tuple[Call | None, dict[str, Any]]:
    """The call to time, warmed up, with its memory; None if it cannot run here, and why."""
    if _needs(case, shape) > 0.8 * free_memory(inputs.device):
        return None, {"status": "too large", "memory": None}
    prepared, status = attempt(lambda: inputs.prepare(_forward(case)), optional=case.backend == "compiled")
    if prepared is None:
        return None, {"status": status, "memory": None}
    return prepared[0], {"status": status, "memory": round(prepared[1] / shape.bytes, 4)}


def _needs(case: Case, shape: Shape) -> int:
    """A safe estimate of the bytes that a case needs; half precision is computed in float32."""
    if case.backend == "triton":
        return 4 * shape.bytes
    samples = 1 if case.estimator == REFERENCE else getattr(make(*parse(case.estimator)), "samples", 1)
    return int((8 + 5 * samples) * shape.elements * max(4, DTYPES[shape.dtype].itemsize))


def _forward(case: Case) -> Callable[..., Tensor]:
    """The function to time: of logits, and of a table where the sample selects from one."""
    if case.estimator == REFERENCE:
        reference = _sample if case.form == "sample" else _select
        return torch.compile(reference, dynamic=False) if case.backend == "compiled" else reference
    name, options = parse(case.estimator)
    estimator = make(name, {**options, "backend": case.backend})
    assert isinstance(estimator, Pathwise)
    if case.form == "sample":
        return estimator.sample
    if case.form == "dense":
        return lambda logits, table: estimator.sample(logits) @ table
    return lambda logits, table: estimator.choose(logits).select(table)


def _sample(logits: Tensor) -> Tensor:
    return F.gumbel_softmax(logits, hard=True)


def _select(logits: Tensor, table: Tensor) -> Tensor:
    return F.gumbel_softmax(logits, hard=True) @ table
