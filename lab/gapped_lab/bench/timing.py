"""How long calls take and how much memory they need, on a GPU and on a CPU."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gapped_lab.records import Timing

Call = Callable[[], object]

# How many batches of a call are timed.
FEWEST, MOST = 3, 100
# Calls that take more seconds are timed as they come: nothing that precedes them shows.
LONG = 0.2


@dataclass(frozen=True)
class Clock:
    """How the calls of a batch are timed."""

    tick: Callable[[Call, int, bool], float]
    """Seconds a call, over so many consecutive calls; whether calls are so long that none leads."""
    batch: float
    """Seconds that a batch takes, about: clocks are coarse, and the overhead of a batch, such as the host not
    yet running ahead of the device, is spread over its calls."""
    lead: int = 1
    """Calls before each batch that are not timed."""


def interleaved(calls: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Timing]:
    """Time all `calls`, a batch of each in turn, about `seconds` for each of them.

    Drift, such as a changing clock rate or another program on the machine, affects every case equally.
    """
    counts, rounds, long = {}, {}, {}
    for name, call in calls.items():
        once = max(clock.tick(call, 1, False), 1e-7)
        if once < LONG:
            # The least of three: a slow first call would leave too few batches.
            once = max(min(once, *(clock.tick(call, 1, False) for _ in range(2))), 1e-7)
        long[name] = once > LONG
        counts[name] = max(1, round(clock.batch / once))
        rounds[name] = min(MOST, max(FEWEST, int(seconds / ((counts[name] + clock.lead) * once))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(rounds.values(), default=0)):
        for name, call in calls.items():
            if turn < rounds[name]:
                times[name].append(1e3 * clock.tick(call, counts[name], long[name]))
    return {name: quantiles(values) for name, values in times.items()}


def quantiles(values: list[float]) -> Timing:
    """The summary of a list of times.

    >>> quantiles([3.0, 1.0, 2.0])
    Timing(median=2.0, low=1.2, high=2.8, batches=3)
    """
    times = torch.tensor(values, dtype=torch.float64)
    points = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    median, low, high = (round(float(q), 6) for q in torch.quantile(times, points))
    return Timing(median, low, high, len(values))


def _device_seconds(call: Call, count: int, is_long: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # Events are created when they are first recorded, which takes a while.
    start.record()
    end.record()
    torch.cuda.synchronize()
    if not is_long:
        # While the device works on this call, the next are queued, as in a training loop.
        call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _wall_seconds(call: Call, count: int, is_long: bool) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.timeit(count).mean)


CLOCKS = {"cuda": Clock(_device_seconds, 1e-2), "cpu": Clock(_wall_seconds, 2e-2, lead=2)}
"""The clock of each type of device."""


def peak_memory(call: Call, device: torch.device) -> int:
    """The most bytes that `call` holds at one time beyond what was allocated before."""
    if device.type == "cpu":
        return _peak_on_cpu(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(call: Call) -> int:
    # The profiler's library writes to standard error when it starts; it reads this at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    peak: int = max(itertools.accumulate((size for _, size in changes), initial=0))
    return peak


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on this system
        return 2**33
