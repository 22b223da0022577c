"""The folder of kernels for the Hub: complete without the library, and the same samples and gradients."""

from __future__ import annotations

import base64
import hashlib
import json
import runpy
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import subprocesses

ROOT = Path(__file__).parents[2]
# How the package `kernels` imports a variant, and the package itself.
BY_PYTHON = """
import importlib.util
name = json.loads((place / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, place / "__init__.py")
sys.modules[name] = hub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)
"""
BY_KERNELS = "import kernels\nhub = kernels.get_local_kernel(place.parents[1], backend='cpu')"
PROGRAM = """
import json, sys, torch
from pathlib import Path
place = Path(sys.argv[1])
{load}
assert hub.__all__ == ["sample"]
logits, weight = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
def pull(draw, estimator):
    torch.manual_seed(0)
    sample = draw(logits, estimator)
    return sample.detach(), torch.autograd.grad(sample, logits, weight)[0]
names = ("gapmax", "gst-auto", "gumbel-softmax", "reinmax", "straight-through")
theirs = {{name: pull(hub.sample, name) for name in names}}
try:
    hub.sample(logits.double())
except ValueError as problem:
    assert "float64" in str(problem)
assert "gapped" not in sys.modules
import gapped
for name, pair in theirs.items():
    estimator = gapped.estimator(name.removesuffix("-auto"), tau=1.0, backend="triton")
    ours = pull(lambda x, _: estimator.sample(x), name)
    assert all(map(torch.equal, pair, ours)), name
    assert pair[1].abs().max() > 0
compiled = torch.compile(hub.sample, fullgraph=True, backend="aot_eager")
assert all(map(torch.equal, pull(compiled, "gapmax"), theirs["gapmax"]))
"""


@pytest.fixture(scope="module")
def write() -> Any:
    return runpy.run_path(str(ROOT / "tools" / "hub.py"))["write"]


def test_the_folder_has_the_layout_of_the_hub(write: Any, tmp_path: Path) -> None:
    place = write(tmp_path)
    assert place == tmp_path / "build" / "torch-cuda"
    metadata = json.loads((place / "metadata.json").read_text("utf-8"))
    assert metadata["backend"] == {"type": "cuda"}
    assert metadata["id"].isidentifier()
    files = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*.py")}
    digests = {name: base64.b64encode(hashlib.sha256(text).digest()).decode() for name, text in files.items()}
    assert metadata["digest"] == {"algorithm": "sha256", "files": digests}
    imported = [line for text in files.values() for line in text.decode().splitlines() if "import" in line]
    assert not [line for line in imported if line.split()[:2] in (["from", "gapped"], ["import", "gapped"])]


@pytest.mark.parametrize("load", [BY_PYTHON, BY_KERNELS], ids=["python", "kernels"])
def test_it_samples_as_the_library_does(write: Any, tmp_path: Path, load: str) -> None:
    pytest.importorskip("triton", reason="needs Triton, whose interpreter runs kernels on a CPU")
    # A folder of these tests has that name, too.
    if load == BY_KERNELS and "kernels" not in {each.name for each in distributions()}:
        pytest.skip("needs the package kernels")
    place = write(tmp_path, "cpu")
    env = subprocesses.environment() | {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    subprocesses.python("-c", PROGRAM.format(load=load), str(place), env=env)
