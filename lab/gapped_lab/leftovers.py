"""What a training function leaves behind: threads and processes that would keep the command from ending."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

# Of prctl: what a process leaves behind becomes a child of this one.
_SET_CHILD_SUBREAPER = 36
# Seconds that threads have to end by themselves, as those of an idle pool do.
_GRACE = 3.0
# A process that is ended leaves its own children here: so many times.
_GENERATIONS = 5


def adopt_orphans() -> None:
    """Make processes whose parent is gone children of this process, where the system can do that."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End the processes that this one has started; where orphans are adopted, those that these left, too."""
    from multiprocessing import active_children

    for process in active_children():
        process.kill()
    for _ in range(_GENERATIONS):
        for child in _children():
            # One that may not be ended, and one that has ended, need no further care.
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> list[int]:
    """The processes that this one has started, where the system lists them."""
    from multiprocessing.resource_tracker import _resource_tracker

    # That of Python itself ends with this process, and says so if it is ended before.
    own = getattr(_resource_tracker, "_pid", None)
    lists = Path("/proc/self/task").glob("*/children")
    return [child for each in lists for child in map(int, each.read_text().split()) if child != own]


def limit_exit(status: int) -> None:
    """Let no thread keep this process from ending with `status`."""
    own = threading.main_thread()
    if any(each is not own and not each.daemon for each in threading.enumerate()):
        timer = threading.Timer(_GRACE, leave, [status])
        timer.daemon = True
        timer.start()


def leave(status: int) -> None:
    """End this process now, whatever still runs in it; what was printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
