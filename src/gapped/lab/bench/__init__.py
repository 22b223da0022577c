"""Time and memory of samplers beside torch's own `F.gumbel_softmax`, as `gapped bench` measures them.

The cases of one shape are measured together, in turns, so that their ratios mean something.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.errors import GappedError
from gapped.lab.bench.cases import DTYPES, REFERENCE, Case, Job, Shape
from gapped.lab.bench.timing import Call, free_memory, interleaved, peak_memory, quantiles
from gapped.lab.environment import describe
from gapped.lab.estimator_text import make, parse
from gapped.lab.records import Bench, Startup
from gapped.pathwise import Pathwise

# Inputs take turns: as many sets as fill these bytes, more than any cache, and at most so many.
ROTATED, SETS = 2**27, 16

IMPORTS = {"import gapped": "import gapped", "import gapped; gapped.gst": "import gapped; gapped.gst"}


def run(
    jobs: Sequence[Job],
    device: torch.device,
    seconds: float = 0.5,
    watch: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Bench]]:
    """Measure the jobs, one list of lines for each as it is done."""
    common = _common(device)
    for job in jobs:
        if device.type == "cuda":
            torch.cuda.empty_cache()
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
    inputs = _Inputs(shape, device)
    calls: dict[str, Call] = {"copy": inputs.copy()}
    lines: dict[str, dict[str, Any]] = {}
    for case in job.cases:
        watch(f"{shape}  {case.estimator} {case.backend}")
        call, result = _prepare(case, inputs)
        if call is not None:
            calls[str(case)] = call
        lines[str(case)] = {**asdict(case), **result}
    watch(f"{shape}  timing")
    times = interleaved(calls, device, seconds)
    common = {"shape": str(shape), **asdict(shape), "copy": times["copy"]}
    return [{**common, **line, "milliseconds": times.get(name)} for name, line in lines.items()]


def _prepare(case: Case, inputs: _Inputs) -> tuple[Call | None, dict[str, Any]]:
    """The call to time, warmed up, with its memory; None if it cannot run here, and why."""
    shape, device = inputs.shape, inputs.device
    if _needs(case, shape) > 0.8 * free_memory(device):
        return None, {"status": "too large", "memory": None}
    try:
        call = inputs.call(case)
        # The first call compiles, the second finds memory as the next ones will.
        for _ in range(2):
            call()
        return call, {"status": "ok", "memory": round(peak_memory(call, device) / shape.bytes, 4)}
    except torch.OutOfMemoryError:
        return None, {"status": "too large", "memory": None}
    except (GappedError, NotImplementedError) as problem:
        reason = str(problem)
    except Exception as problem:
        # A compiler that is missing or fails must not lose the other results.
        if case.backend != "compiled":
            raise
        reason = type(problem).__name__
    return None, {"status": f"not available: {reason}", "memory": None}


def _needs(case: Case, shape: Shape) -> int:
    """A safe estimate of the bytes that a case needs; half precision is computed in float32."""
    if case.backend == "triton":
        return 4 * shape.bytes
    samples = 1 if case.estimator == REFERENCE else getattr(make(*parse(case.estimator)), "samples", 1)
    return int((8 + 5 * samples) * shape.elements * max(4, DTYPES[shape.dtype].itemsize))


class _Inputs:
    """Logits and incoming gradients that take turns, and the calls that use them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.device, self.shape, self.dtype = device, shape, DTYPES[shape.dtype]
        sets = min(SETS, max(1, ROTATED // (2 * shape.bytes)))
        self.logits = [self._normal(shape.rows, shape.categories).requires_grad_() for _ in range(sets)]
        self.table = None
        if shape.width:
            self.table = self._normal(shape.categories, shape.width).requires_grad_()
        self.gradients = [self._normal(shape.rows, shape.width or shape.categories) for _ in range(sets)]

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device, generator=self.generator)

    def copy(self) -> Call:
        """A copy of one logits tensor: two passes over memory, the unit of the floor."""
        target = torch.empty_like(self.logits[0])
        sources = itertools.cycle([x.detach() for x in self.logits])
        return lambda: target.copy_(next(sources))

    def call(self, case: Case) -> Call:
        """Forward and backward of a case; each call uses the next inputs."""
        forward = _forward(case)
        turns = itertools.cycle(list(zip(self.logits, self.gradients, strict=True)))

        def forward_backward() -> tuple[Tensor, ...]:
            logits, gradient = next(turns)
            leaves = (logits,) if self.table is None else (logits, self.table)
            return torch.autograd.grad(forward(*leaves), leaves, gradient)

        return forward_backward


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
