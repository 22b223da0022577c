"""Time and memory of a workload's ways, alone: `python -m gapped_lab.workloads.timing NAME FILE [WAY ...]`.

A line of JSON for each way of the first setting. Runs that train side by side wait for each other.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gapped_lab.workloads import find_workload

PART: dict[str, dict[str, int]] = {
    "router": {"steps": 60, "every": 20},
    "world-model": {"steps": 30, "every": 10},
    "tokens": {"steps": 6, "every": 2},
    "tokenizer": {"epochs": 3},
}
"""Three parts of a training: the fastest counts."""


def timings(name: str, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step and MiB of those ways, of all without any; of several rates the first."""
    workload = find_workload(name)
    setting, cells = next(iter(workload.settings(False).items()))
    kinds = {label.split(", rate")[0]: cell for label, cell in reversed(list(cells.items()))}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    for label, cell in kinds.items():
        if not ways or label in ways:
            *_, last = workload.train(replace(cell, **PART[name]), 0)
            numbers = {key: last[key] for key in ("ms_a_step", "mib")}
            yield {"workload": name, "setting": setting, "way": label, **numbers, "device": device}


if __name__ == "__main__":
    chosen, file, *rest = sys.argv[1:]
    with Path(file).open("a", encoding="utf-8") as stream:
        for line in timings(chosen, rest):
            print(json.dumps(line), file=stream, flush=True)
