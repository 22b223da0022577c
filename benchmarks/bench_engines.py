"""What an engine adds to the local one: time on the smoke recipe of eight fleets, one worker, start-up aside.

Each engine is timed next to the local one, alternately and in processes that are warm. The time is that from
the end of the first fleet, which pays for whatever starts, to the end of the eighth. Target: at most 1.10.
Usage: python benchmarks/bench_engines.py [--repeats N] [--engine torchrun|ray]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gapped_lab.engines import Engine
from gapped_lab.engines.local import Local
from gapped_lab.planning import Fleet
from gapped_lab.progress import Callbacks
from gapped_lab.recipe import find_recipe
from gapped_lab.store import Store
from gapped_lab.training import Settings

TARGET = 1.10


class Clock(Callbacks):
    """Notes when fleets end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def done(self, fleet: Fleet) -> None:
        self.ends.append(time.perf_counter())


def seconds(engine: Engine) -> float:
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        engine.run([find_recipe("smoke")], Store(Path(folder)), Settings(callbacks=clock))
    assert len(clock.ends) == 8
    return clock.ends[-1] - clock.ends[0]


def compare(name: str, engine: Engine, repeats: int) -> None:
    """Print the median of the ratios of neighbouring measurements."""
    local = Local("cpu")
    for warm in (local, engine):
        seconds(warm)
    pairs = [(seconds(engine), seconds(local)) for _ in range(repeats)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    middle = statistics.median(ratios)
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    verdict = "within" if middle <= TARGET else "ABOVE"
    print(
        f"{name}: {ours:.2f} s, local {theirs:.2f} s; ratio {middle:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {repeats} pairs), {verdict} {TARGET:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=["torchrun", "ray"], help="only this one")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    # Ray gives a task of one CPU one thread, and torchrun several ranks one each: so for all.
    torch.set_num_threads(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from gapped_lab.engines.torchrun import Torchrun

        compare("torchrun", Torchrun("cpu"), repeats)
        return
    if arguments.engine in (None, "torchrun"):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        subprocess.run([*launcher, __file__, "--repeats", str(repeats)], check=True)
    if arguments.engine in (None, "ray"):
        compare_ray(repeats)


def compare_ray(repeats: int) -> None:
    try:
        import ray
    except ImportError:
        print("ray: not installed")
        return
    from gapped_lab.engines.ray import SETTINGS, Ray

    os.environ |= SETTINGS
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    compare("ray", Ray("cpu"), repeats)


if __name__ == "__main__":
    main()
