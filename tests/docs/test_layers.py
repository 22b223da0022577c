"""The rooms of the package: imports go one way, the library needs no laboratory, the picture is true."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = runpy.run_path(str(DOCS / "layers.py"))
MODULES = LAYERS["modules"]()
# What `import gapped` needs; kernels import Triton, diagnostics numpy and pandas, where these are installed.
OTHERS = (
    "gapped_lab",
    "gapped.adapters",
    "gapped.cli",
    "gapped.comparison",
    "gapped.diagnostics",
    "gapped.jax",
    "gapped.kernels",
)
CORE = sorted(name for name in MODULES if not name.startswith(OTHERS))


def crossing(source: str, module: str) -> list[str]:
    """The imports that lead from the library into the laboratory."""
    names = sorted(LAYERS["imports"](source, module))
    return [] if module.startswith("gapped_lab") else [n for n in names if n.startswith("gapped_lab")]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_library_does_not_import_the_laboratory(module: str) -> None:
    assert crossing(MODULES[module], module) == []


@pytest.mark.parametrize(
    "source", ["from gapped_lab import records", "def f():\n    from gapped_lab.fleet import adam"]
)
def test_an_import_of_the_laboratory_is_seen(source: str) -> None:
    assert len(crossing(source, "gapped.nn")) == 1


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_is_taken_from_the_package_itself(module: str) -> None:
    """The front door imports everything: `from gapped import GST` inside the package would hide a cycle."""
    names = LAYERS["imports"](MODULES[module], module) - {"gapped", "gapped._version.__version__"}
    assert [name for name in names if name.startswith("gapped") and LAYERS["room_of"](name) is None] == []


def test_no_room_imports_one_that_imports_it() -> None:
    graph = LAYERS["graph"](MODULES)
    assert {room for layer in LAYERS["layers"](graph) for room in layer} == set(LAYERS["WORDS"])
    with pytest.raises(ValueError, match="simplex"):
        LAYERS["layers"]({**graph, "checks": {"simplex"}})


def test_the_picture_is_drawn_from_the_imports() -> None:
    picture = LAYERS["draw"](LAYERS["graph"](MODULES))
    assert LAYERS["TARGET"].read_text("utf-8") == picture, "run: python docs/layers.py"


@pytest.mark.parametrize("module", CORE)
def test_the_core_needs_torch_and_nothing_else(module: str) -> None:
    roots = {name.split(".")[0] for name in LAYERS["imports"](MODULES[module], module)}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "gapped"}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("gapped.jax")])
def test_jax_needs_no_torch(module: str) -> None:
    """Of the library it imports what imports no other package; one module calls the kernels."""
    names = LAYERS["imports"](MODULES[module], module)
    roots = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    last = module.split(".")[-1]
    assert roots <= {"jax", "numpy", "gapped"} | ({"jax_triton", "triton"} if last == "kernels" else {last})
    rooms = {LAYERS["room_of"](name) for name in names} - {None, "jax"}
    assert rooms <= {"docstrings", "errors", "texts"} | ({"kernels"} if last == "kernels" else set())


# Distributions for other libraries; the rooms of torch's are in `gapped.distributions`.
WITHOUT_TWIN = ("gapped.jax.__init__", "gapped.jax.distrax", "gapped.jax.numpyro")


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("gapped.jax")])
def test_a_file_for_jax_is_the_twin_of_a_room(module: str) -> None:
    twin = module.replace(".jax.", ".")
    assert {twin, f"{twin}.__init__"} & MODULES.keys() or module in WITHOUT_TWIN


@pytest.mark.parametrize("module", ["gapped.errors", "gapped.texts"])
def test_what_jax_imports_needs_no_package(module: str) -> None:
    roots = {name.split(".")[0] for name in LAYERS["imports"](MODULES[module], module)}
    assert roots <= {"gapped"} | set(sys.stdlib_module_names)


def test_a_base_class_loads_none_of_its_uses() -> None:
    edges = {"gapped.pathwise.gst": "def f():\n    from gapped import gates", "gapped.gates": ""}
    assert LAYERS["graph"](edges)["pathwise"] == set()
    loaded = {**edges, "gapped.pathwise.mve": "from gapped.gates import gate"}
    assert LAYERS["graph"](loaded)["pathwise"] == {"gates"}
