"""From hidden states to the embedding of a sampled token, forward and backward: time and memory.

    python benchmarks/bench_vocabulary.py [--threads 1] [--width 256] [--dtype f32] [--shape 512x8000 ...]

Three ways: torch's one-hot Gumbel-softmax times the table, GST's index on dense logits, and
`gapped.linear_choice`, which holds no logits. The table is the weight itself. Memory is the peak beyond what
exists before the call, gradients included. Calls take turns; the fastest counts, in processor time, so that
a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped
from gapped.lab.bench.cases import DTYPES
from gapped.lab.bench.timing import peak_memory

SHAPES = ("512x8000", "1024x8000", "2048x8000", "4096x8000", "512x16000", "512x32000", "512x64000")
GST = gapped.GST(0.85, gap="auto")
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": lambda hidden, weight: F.gumbel_softmax(hidden @ weight.T, hard=True) @ weight,
    "dense logits": lambda hidden, weight: GST.choose(hidden @ weight.T).select(weight),
    "linear_choice": lambda hidden, weight: GST.choose_linear(hidden, weight).select(weight),
}


def fastest(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Seconds of processor time of each call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            began = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - began)
    return best


def measure(rows: int, categories: int, width: int, dtype: torch.dtype, turns: int) -> list[str]:
    """The cells of one shape."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = normal(rows, width).requires_grad_(), normal(categories, width).requires_grad_()
    upstream = normal(rows, width)

    def call(way: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(WAYS[way](hidden, weight), (hidden, weight), upstream)

    calls = {way: call(way) for way in WAYS}
    times = fastest({**calls, "product": lambda: hidden.detach() @ weight.detach().T}, turns)
    memory = {way: peak_memory(call, torch.device("cpu")) for way, call in calls.items()}
    cells = [f"{times[way]:.2f} s, {memory[way] / 2**20:.0f} MiB" for way in WAYS]
    return [f"{rows} x {categories}", *cells, f"{5 * times['product']:.2f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", action="append", metavar="ROWSxCATEGORIES")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    head = ["rows x categories", *WAYS, "five products"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for shape in chosen.shape or SHAPES:
        rows, categories = map(int, shape.split("x"))
        cells = measure(rows, categories, chosen.width, DTYPES[chosen.dtype], chosen.turns)
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
