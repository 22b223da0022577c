"""A server runs the targets of the Makefile: workflows set up, call targets, and hand files on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import subprocesses

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra docs brings")

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in GITHUB.glob("workflows/*.yml")}
FORMS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml")}
TARGETS = set(re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)[1].split())
# Checkout, an interpreter, files from one job to the next, pages, and the upload to the index.
ACTIONS = {
    "actions/checkout",
    "actions/setup-python",
    "actions/upload-artifact",
    "actions/download-artifact",
    "actions/upload-pages-artifact",
    "actions/deploy-pages",
    "pypa/gh-action-pypi-publish",
}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def faults(workflow: dict[str, Any]) -> list[str]:
    """Steps that are neither a target of the Makefile nor an action of the list."""
    wrong = []
    for step in steps(workflow):
        if "run" in step:
            program, *targets = shlex.split(step["run"])
            if program != "make" or not targets or not set(targets) <= TARGETS:
                wrong.append(step["run"])
        elif step["uses"].partition("@")[0] not in ACTIONS:
            wrong.append(step["uses"])
    return wrong


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_targets_of_the_makefile(name: str) -> None:
    assert faults(WORKFLOWS[name]) == []
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(
    "step", [{"run": "pip install x"}, {"run": "make nothing"}, {"run": "make\npytest"}, {"uses": "a/b@v1"}]
)
def test_another_step_is_found(step: dict[str, Any]) -> None:
    assert faults({"jobs": {"a": {"steps": [step]}}})


CALLED = sorted({step["run"] for workflow in WORKFLOWS.values() for step in steps(workflow) if "run" in step})


@pytest.mark.parametrize("command", CALLED)
def test_make_knows_how_to_run_it(command: str) -> None:
    """Every file that a target needs is here or made; nothing is run."""
    printed = subprocesses.run(*shlex.split(command), "--dry-run", cwd=ROOT)
    assert "python" in printed


def test_the_tests_run_on_every_python_and_on_both_ends_of_torch() -> None:
    jobs = WORKFLOWS["tests"]["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert {"make test", "make floors-lowest", "make floors-newest"} <= set(CALLED)
    # The targets name the interpreters that these jobs set up.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for job, variable in (("lowest", "LOWEST"), ("newest", "NEWEST")):
        (version,) = [
            s["with"]["python-version"] for s in jobs[job]["steps"] if "python-version" in s.get("with", {})
        ]
        assert f"{variable} ?= python{version}\n" in makefile


def test_every_checkout_has_the_tags() -> None:
    """The version is that of the tag."""
    for name, workflow in WORKFLOWS.items():
        for step in steps(workflow):
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["fetch-depth"] == 0, name


def test_a_tag_is_published_without_a_token() -> None:
    release = WORKFLOWS["release"]
    # YAML reads the key `on` as a truth value.
    assert release[True] == {"push": {"tags": ["v*"]}}
    assert [step["run"] for step in steps(release) if "run" in step] == ["make release-check", "make dist"]
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == {"name": "pypi"}
    assert not [path for path in GITHUB.rglob("*.yml") if "secrets." in path.read_text("utf-8")]


def test_the_forms_ask_for_a_program_and_for_the_doctor() -> None:
    assert set(FORMS) == {"wrong_number", "bug"}
    for form in FORMS.values():
        assert form["name"]
        assert form["description"]
        fields = {field["id"]: field for field in form["body"]}
        assert {"program", "doctor"} <= set(fields)
        assert "`gapped doctor`" in fields["doctor"]["attributes"]["label"]
        assert all(field["attributes"]["label"] for field in fields.values())
