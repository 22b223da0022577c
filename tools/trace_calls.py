"""Count the files that a call walks through: `python tools/trace_calls.py [gst linear_choice jax.gst ...]`.

For each walk: Python calls inside of the package, the files they are in, and returns: calls into a file that
is still on the stack below another one. `modules` is the number of the package's modules that a fresh
interpreter has loaded after the call.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gapped

PACKAGE = str(Path(gapped.__file__).parent)


def gst() -> Callable[[], Any]:
    import torch

    logits = torch.randn(32, 10, requires_grad=True)
    return lambda: gapped.gst(logits, hard=True)


def sample() -> Callable[[], Any]:
    import torch

    logits = torch.randn(32, 10, requires_grad=True)
    return lambda: gapped.sample(logits)


def choose() -> Callable[[], Any]:
    import torch

    logits, table = torch.randn(32, 10, requires_grad=True), torch.randn(10, 4)
    return lambda: gapped.GST().choose(logits).select(table).sum().backward()


def linear_choice() -> Callable[[], Any]:
    import torch

    hidden, weight = torch.randn(32, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    return lambda: gapped.linear_choice(hidden, weight).select(weight).sum().backward()


def expectation() -> Callable[[], Any]:
    import torch

    logits = torch.randn(32, 10, requires_grad=True)
    return lambda: gapped.expectation(lambda z: z[..., 0], logits, gapped.RLOO(4)).sum().backward()


def jax_gst() -> Callable[[], Any]:
    import jax

    import gapped.jax

    logits, key = jax.numpy.linspace(-1.0, 1.0, 10), jax.random.key(0)
    # A function of its own for each call: JAX would not trace the same one again.
    return lambda: jax.grad(lambda x: gapped.jax.gst(key, x, hard=True)[0])(logits)


def compare() -> Callable[[], Any]:
    import tempfile

    folder = tempfile.mkdtemp()
    seeds = iter(range(1, 1000))
    train = lambda estimator, seed: float(seed)  # noqa: E731
    return lambda: gapped.compare(train, ["gst", "reinmax"], seeds=next(seeds), out=folder)


WALKS: dict[str, Callable[[], Callable[[], Any]]] = {
    "gst": gst,
    "sample": sample,
    "choose": choose,
    "linear_choice": linear_choice,
    "expectation": expectation,
    "jax.gst": jax_gst,
    "compare": compare,
}


def trace(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Calls, files and returns of the second of two calls."""
    call()
    stack: list[str] = []
    counts = {"calls": 0, "returns": 0}
    files: set[str] = set()

    def profile(frame: Any, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or event not in ("call", "return"):
            return
        if event == "return":
            if stack:
                stack.pop()
            return
        counts["calls"] += 1
        counts["returns"] += bool(stack) and name != stack[-1] and name in stack
        files.add(name)
        stack.append(name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["calls"], len(files), counts["returns"]


def modules(walk: str) -> int:
    """Modules of the package that are loaded after one call in a fresh interpreter."""
    code = (
        "import sys, trace_calls as t; t.WALKS[sys.argv[1]]()();"
        "print(sum(name.split('.')[0] == 'gapped' for name in sys.modules))"
    )
    command = [sys.executable, "-c", code, walk]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    print(f"{'walk':<14} {'calls':>6} {'files':>6} {'returns':>8} {'modules':>8}")
    for walk in sys.argv[1:] or WALKS:
        print(f"{walk:<14} {'{:>6} {:>6} {:>8}'.format(*trace(WALKS[walk]()))} {modules(walk):>8}")
