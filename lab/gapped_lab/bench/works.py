"""Time and memory of workloads: every way at one size, measured in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gapped_lab.bench import jax_ways
from gapped_lab.bench.cases import DTYPES
from gapped_lab.bench.inputs import Inputs, attempt, turns
from gapped_lab.bench.timing import CLOCKS, Call, interleaved
from gapped_lab.bench.workloads import Problem, Task

# Makes the call of a way; with the bytes that it needs beyond its inputs, where they are known.
Prepare = Callable[[], tuple[Call, int | None]]


def measure_work(
    task: Task, device: torch.device, seconds: float, watch: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The lines of one workload at one size, without what all lines of a run share."""
    problem = task.problem
    calls: dict[str, Call] = {}
    lines: list[dict[str, Any]] = []
    common = {"work": task.work, "sizes": [*task.sizes], "dtype": task.dtype, "logits": task.logits_bytes}
    gradients = DTYPES[task.dtype].itemsize * sum(map(math.prod, problem.inputs))
    watch(f"{task.work}  inputs")
    ways, absent = attempt(partial(_ways, task, problem, device))
    for case in task.cases:
        watch(f"{task.work}  {case}")
        prepared, status = (None, absent) if ways is None else attempt(ways[case])
        line = {**common, "way": case, "status": status}
        if prepared is not None:
            calls[case], line["memory"] = prepared
        if problem.result and case not in problem.parts:
            line["gradients"] = gradients
        lines.append(line)
    times = interleaved(calls, jax_ways.CLOCK if problem.jax else CLOCKS[device.type], seconds)
    return [{**line, "milliseconds": times.get(line["way"])} for line in lines]


def _ways(task: Task, problem: Problem, device: torch.device) -> Mapping[str, Prepare]:
    """How each way is prepared; all of them use the same inputs."""
    dtype = DTYPES[task.dtype]
    if problem.jax:
        (shape,) = problem.inputs
        arrays = jax_ways.JaxInputs(shape, task.dtype, device, turns(2 * math.prod(shape), dtype))
        return {name: partial(arrays.prepare, way) for name, way in problem.ways.items()}
    inputs = Inputs(problem.inputs, problem.result, dtype, device, problem.scale)
    ways = {name: partial(inputs.prepare, way) for name, way in problem.ways.items()}
    return ways | {name: partial(inputs.prepare, part, alone=True) for name, part in problem.parts.items()}
