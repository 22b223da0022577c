"""From hidden states to the embedding of a sampled token, forward and backward: time and memory.

    python benchmarks/bench_vocabulary.py [--device cuda] [--out results] [--shape 512x256x8000 ...]
    python benchmarks/bench_vocabulary.py --device cuda --tune
    python benchmarks/bench_vocabulary.py --device cuda --profile

Four ways: torch's one-hot Gumbel-softmax times the table, GST's index on dense logits, the choice without
logits, `gapped.linear_choice`, and one product of hidden states and weight, of which a choice contains five.
The table is a tensor of its own or the weight. Decoding is 64 rows without a gradient. Memory is the peak
beyond what exists before the call and the gradients; the selected rows are in it. Calls take turns. On a CPU
times are processor time, so that a busy machine disturbs little. `--out` appends records to a file
`vocabulary.jsonl`, of which `python docs/generate/update.py` makes the numbers and the figure of
docs/vocabulary.md. `--tune` tries other sizes of chunks; `--profile` has the time of each kernel of a call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped
from gapped.comparison.records import write
from gapped.comparison.runs import describe
from gapped.vocabulary import head
from gapped_lab.bench.cases import DTYPES
from gapped_lab.bench.timing import CLOCKS, interleaved, peak_memory, quantiles
from gapped_lab.environment import pick_device
from gapped_lab.records import LinearTiming, Timing

GST = gapped.GST(0.85, gap="auto")
WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": lambda hidden, weight, table: F.gumbel_softmax(hidden @ weight.T, hard=True) @ table,
    "dense logits": lambda hidden, weight, table: GST.choose(hidden @ weight.T).select(table),
    "linear_choice": lambda hidden, weight, table: GST.choose_linear(hidden, weight).select(table),
}
LINEAR, PRODUCT = "linear_choice", "product"
DECODED = 64


@dataclass(frozen=True)
class Case:
    """Sizes, what rows are selected from, and who is timed."""

    rows: int
    width: int
    categories: int
    table: str = "own"
    ways: tuple[str, ...] = (*WAYS, PRODUCT)


CPU = [
    *(Case(rows, 256, 8000, "weight") for rows in (512, 1024, 2048, 4096)),
    *(Case(512, 256, categories, "weight") for categories in (16_000, 32_000, 64_000)),
    Case(512, 256, 32_000, "own"),
    Case(DECODED, 256, 32_000, "none", (LINEAR, PRODUCT)),
]
TARGETS = [Case(8192, 4096, 128_256), Case(32_768, 2048, 50_304)]
FEW = (LINEAR, PRODUCT)
GPU = [
    *TARGETS,
    *(Case(each.rows, each.width, each.categories, "weight", FEW) for each in TARGETS),
    *(Case(rows, 4096, 128_256, ways=FEW) for rows in (1024, 2048, 4096, 16_384)),
    *(Case(8192, 4096, categories, ways=FEW) for categories in (32_000, 64_000, 151_936, 262_144)),
    *(Case(DECODED, 4096, categories, "none", FEW) for categories in (50_304, 128_256, 262_144)),
]


def calls_of(
    case: Case, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[], object]], int]:
    """What is timed, and the bytes of the gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        # Logits of about unit size, whatever the width.
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(shape[-1] ** -0.25)

    hidden, weight = normal(case.rows, case.width), normal(case.categories, case.width)
    table = normal(case.categories, case.width) if case.table == "own" else weight
    upstream = normal(case.rows, case.width)
    leaves = [hidden, weight, *([table] if case.table == "own" else [])]
    calls: dict[str, Callable[[], object]] = {PRODUCT: lambda: hidden.detach() @ weight.detach().T}
    if case.table == "none":
        calls[LINEAR] = torch.no_grad()(lambda: GST.choose_linear(hidden, weight).index)
        return {way: calls[way] for way in case.ways}, 0
    for leaf in leaves:
        leaf.requires_grad_()
    for way, use in WAYS.items():
        calls[way] = lambda use=use: torch.autograd.grad(use(hidden, weight, table), leaves, upstream)
    return {way: calls[way] for way in case.ways}, sum(leaf.nbytes for leaf in leaves)


def processor_times(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, Timing]:
    """Milliseconds of processor time of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            began = time.process_time()
            call()
            times[name].append(1e3 * (time.process_time() - began))
    return {name: quantiles(values) for name, values in times.items()}


def measure(
    case: Case, dtype: str, device: torch.device, turns: int, seconds: float, place: dict[str, Any]
) -> Iterator[LinearTiming]:
    """The records of one case; `place` is what they say of the run."""
    calls, gradients = calls_of(case, DTYPES[dtype], device)
    memory = {}
    for way, call in calls.items():
        # The first call compiles kernels and makes room for the workspace of products.
        call()
        memory[way] = (peak_memory(call, device) - (0 if way == PRODUCT else gradients)) / 2**20
    on_gpu = device.type == "cuda"
    times = interleaved(calls, CLOCKS[device.type], seconds) if on_gpu else processor_times(calls, turns)
    sizes = {"rows": case.rows, "width": case.width, "categories": case.categories, "dtype": dtype}
    for way in calls:
        spent = {"milliseconds": times[way], "memory": round(memory[way], 2)}
        yield LinearTiming(**{"run": "", **place}, **sizes, way=way, table=case.table, **spent)


def line_of(record: LinearTiming) -> str:
    assert record.milliseconds is not None
    sizes = f"{record.rows} x {record.width} x {record.categories} {record.dtype}"
    spent = record.milliseconds
    times = f"{spent.median:.3f} ms ({spent.low:.3f} to {spent.high:.3f})"
    return f"{sizes}, table {record.table}, {record.way}: {times}, {record.memory:.0f} MiB beyond gradients"


def tune(device: torch.device, dtype: str, seconds: float) -> Iterator[str]:
    """`linear_choice` with other sizes, one at a time, where they matter."""
    from gapped.kernels.sampling import long

    training = [replace(case, ways=(LINEAR,)) for case in TARGETS]
    decoding = [Case(DECODED, 4096, 128_256, "none", (LINEAR,))]
    sizes: list[tuple[Any, str, tuple[int, ...], list[Case]]] = [
        (head, "MEMORY", tuple(mib << 20 for mib in (160, 256, 384, 512)), training),
        (head, "TILE", (128, 256, 512), training),
        (long, "FEW_ROWS", (0, 128), decoding),
        (long, "FEW_CHUNK", (4096, 8192, 16_384), decoding),
    ]
    for module, name, values, cases in sizes:
        before = getattr(module, name)
        for value in values:
            setattr(module, name, value)
            for case in cases:
                (record,) = measure(case, dtype, device, 3, seconds, {})
                yield f"{name} = {value}: {line_of(record)}"
        setattr(module, name, before)


def profiled(case: Case, dtype: str, device: torch.device) -> Iterator[str]:
    """Milliseconds of each kernel in a call of `linear_choice`."""
    from torch.profiler import ProfilerActivity, profile

    calls, _ = calls_of(replace(case, ways=(LINEAR,)), DTYPES[dtype], device)
    call, turns = calls[LINEAR], 3
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(turns):
            call()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in kernels) / turns / 1e3
    yield f"{case.rows} x {case.width} x {case.categories}, table {case.table}: {busy:.3f} ms of kernels"
    for each in kernels[:16]:
        spent, count = each.self_device_time_total / turns / 1e3, each.count / turns
        yield f"  {spent:8.3f} ms in {count:5.1f} launches: {each.key[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shape", action="append", metavar="ROWSxWIDTHxCATEGORIES")
    parser.add_argument("--dtype", choices=DTYPES, help="f32 on a CPU, bf16 on a GPU unless given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="on a CPU")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each call, on a GPU")
    parser.add_argument("--out", type=Path, help="a folder of records")
    parser.add_argument("--tune", action="store_true", help="try other sizes of chunks")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = pick_device(chosen.device)
    dtype = chosen.dtype or ("bf16" if device.type == "cuda" else "f32")
    if chosen.tune:
        for line in tune(device, dtype, chosen.seconds):
            print(line, flush=True)
        return
    if chosen.profile:
        for case in (*TARGETS, Case(DECODED, 4096, 128_256, "none", FEW)):
            print(*profiled(case, dtype, device), sep="\n", flush=True)
        return
    run = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    place = {"run": run, "device_type": device.type, "environment": describe(device)}
    cases = GPU if device.type == "cuda" else CPU
    if chosen.shape:
        cases = [Case(*map(int, shape.split("x"))) for shape in chosen.shape]
    for case in cases:
        records = list(measure(case, dtype, device, chosen.turns, chosen.seconds, place))
        print(*map(line_of, records), sep="\n", flush=True)
        if chosen.out:
            write(chosen.out, records)


if __name__ == "__main__":
    main()
