"""Functions as tasks of Ray, on a cluster or on this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gapped.errors import GappedError, one_line, require

try:
    import ray as ray
except ModuleNotFoundError:
    ray = None

# Of a cluster on this machine. By default Ray's workers give way to every other process (niceness 15): on a
# busy machine they would take many times as long as the local engine.
SETTINGS = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
POLL_SECONDS = 0.2
# How often a task may lose its worker.
RETRIES = 3
_ANSWER_SECONDS = 60


def check_installed() -> None:
    """Say at once, in a line, that Ray is missing."""
    if ray is None:
        require("--engine ray", "ray", extra="ray")


def answer(reference: Any) -> Any:
    """What a task returned, or the error that lost it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as problem:
        # Ray's errors carry the traceback of the worker in their text.
        return getattr(problem, "cause", None) or problem


def in_tasks(function: Callable[[int], Any], items: Iterator[int]) -> Iterator[tuple[int, Any]]:
    """`function` of each item, a task each, as they finish: the item, and the result or the error.

    The function travels once, by value where it must. A task takes a GPU if the cluster has any, else a CPU,
    and no more are given to Ray than the cluster has of these: then `items` is asked for the next one.
    """
    kind = "GPU" if device_type("auto", None) == "cuda" else "CPU"
    try:
        payload = ray.put(ray.cloudpickle.dumps(function))
    except Exception as problem:
        raise GappedError(f"train: it cannot be sent to Ray ({one_line(problem)[:200]})") from problem
    task = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_retries=RETRIES)(_unpack_and_call)
    path = [os.path.abspath(each) for each in sys.path]
    running: dict[Any, int] = {}
    try:
        while True:
            room = max(1, int(ray.cluster_resources().get(kind, 0)))
            while len(running) < room and (item := next(items, None)) is not None:
                running[task.remote(payload, path, item)] = item
            if not running:
                return
            ready, _ = ray.wait(list(running), timeout=POLL_SECONDS)
            for reference in ready:
                yield running.pop(reference), answer(reference)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _unpack_and_call(payload: bytes, path: list[str], item: int) -> Any:
    """In a worker: what the driver can import, this process can, if it sees the folder."""
    sys.path += [each for each in path if each not in sys.path]
    return ray.cloudpickle.loads(payload)(item)


def device_type(device: str, address: str | None) -> str:
    """Ray decides which GPU; whether it is one is decided here."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if device == "auto":
        return "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus and address is None:
        # A cluster may grow; this machine does not.
        raise GappedError("device: got 'cuda', but Ray sees no GPU here; use --device cpu")
    return device


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to the cluster, ended afterwards unless it was there before."""
    if ray.is_initialized():
        yield
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if address is not None:
        _check_answers(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    what, how = f"--ray-address: got {address!r}", {}
    if address is None:
        what, how = "--engine ray: Ray did not start here", {"include_dashboard": False}
    try:
        ray.init(address or "local", logging_level=logging.ERROR, **how)
    except Exception as problem:  # a time-out is a bare one
        ray.shutdown()
        raise GappedError(f"{what}: {(str(problem) or repr(problem)).splitlines()[0]}") from problem
    for number, handler in handlers.items():
        # Ray's own for SIGTERM ends the process at once, without a checkpoint.
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Fail if no cluster answers in time: Ray would try for ever. What else may be wrong, Ray itself says."""
    connect = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        subprocess.run(
            [sys.executable, "-c", connect, address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_SECONDS,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        answers = f"no Ray cluster answers within {_ANSWER_SECONDS} seconds"
        raise GappedError(f"--ray-address: got {address!r}, where {answers}") from None
