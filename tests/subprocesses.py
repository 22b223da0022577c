"""Commands in processes of their own, on one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
HIDDEN = ("PYTHONPATH", "GAPPED_DATA", "PYTEST_ADDOPTS", "TRITON_INTERPRET")


def environment(*path: Path, bare: bool = False) -> dict[str, str]:
    """This process's variables with folders in front of Python's path; `bare` drops what bears on tests."""
    variables = {name: value for name, value in os.environ.items() if not (bare and name in HIDDEN)}
    folders = [*map(str, path), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}


def run(*command: str, env: dict[str, str] | None = None, **how: Any) -> str:
    """The output of a command. One that fails is an assertion error with the end of its output."""
    how = {"env": env or environment(), "capture_output": True, "text": True, "timeout": 280, **how}
    process = subprocess.run(command, check=False, **how)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return str(process.stdout)


def python(*arguments: str, **how: Any) -> str:
    """The output of an interpreter."""
    return run(sys.executable, *arguments, **how)
