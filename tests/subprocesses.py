"""Commands in processes of their own, on one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
HIDDEN = ("PYTHONPATH", "GAPPED_DATA", "PYTEST_ADDOPTS", "TRITON_INTERPRET")


def environment(*path: Path, bare: bool = False) -> dict[str, str]:
    """This process's variables with folders in front of Python's path; `bare` drops what bears on tests."""
    variables = {name: value for name, value in os.environ.items() if not (bare and name in HIDDEN)}
    folders = [*map(str, path), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}


def done(*command: str, env: dict[str, str] | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, well or not."""
    how = {"env": env or environment(), "capture_output": True, "text": True, "timeout": 280, **how}
    return subprocess.run(command, check=False, **how)


def run(*command: str, **how: Any) -> str:
    """The output of a command. One that fails is an assertion error with the end of its output."""
    process = done(*command, **how)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return str(process.stdout)


def python(*arguments: str, **how: Any) -> str:
    """The output of an interpreter."""
    return run(sys.executable, *arguments, **how)


def fork_ranks(main: Callable[[int, Path], None], world: int) -> int:
    """Run `main` in forks of this process, each with its rank and the folder on the command line.

    The forks have imported torch once. Returns the worst exit code.
    """
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            try:
                main(rank, Path(sys.argv[1]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            # In about one launch of thirty, gloo's threads abort a rank while its interpreter shuts down.
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
