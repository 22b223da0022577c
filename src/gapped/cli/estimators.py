"""`gapped estimators`: every estimator in a line; `gapped properties`: which properties one has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Annotated, NamedTuple

import typer

import gapped
from gapped.cli import command
from gapped.docstrings import ARGUMENTS, describing
from gapped.errors import reject
from gapped.texts import DEFAULT, kind_of

_FAMILIES = ("pathwise", "score")
# Options that all of a family share; a line of their own says so.
_SHARED = ("hard", "draw", "backend")


class Member(NamedTuple):
    """An estimator as its source describes it."""

    public: str
    """The name of its class."""
    help: str
    """The docstring of its class."""
    options: dict[str, str]
    """Its options with their defaults, which are the recommended values."""


def estimators(
    name: Annotated[
        str | None, typer.Argument(help="Describe this one, with its options; without it, all are listed.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="pathwise (samples carry the gradient) or score (it is computed from costs)."),
    ] = None,
) -> None:
    """List the estimators with their options, or describe one.

    Commands take an estimator as NAME or NAME:OPTION=VALUE,..., such as gst:gap=1,tau=0.5; so do recipes
    and, in Python, everything with estimator=. The values shown are the recommended ones.

    \b
    Examples:
      gapped estimators
      gapped estimators gapmax
      gapped estimators --family pathwise
    """
    if family not in (None, *_FAMILIES):
        raise reject("family", family, f"one of {', '.join(_FAMILIES)}, or None for both")
    members = {key: each for kind in _FAMILIES if family in (None, kind) for key, each in _members(kind)}
    if name is not None:
        print(_description(name, members))
        return
    rows = [
        (f"{key} (default)" if key == DEFAULT else key, each.help.partition("\n")[0], _spell(each.options))
        for key, each in members.items()
    ]
    command.show_rows(("name", "what it is", "options"), rows)


def _spell(options: dict[str, str]) -> str:
    return ",".join(f"{option}={value}" for option, value in options.items())


def _members(family: str) -> Iterator[tuple[str, Member]]:
    """The estimators of a family by name, read from their source: an import waits for torch."""
    known: dict[str, dict[str, str]] = {"Pathwise": {"tau": "1.0"}}
    for public, home in gapped._HOME.items():
        if not home.startswith(f"gapped.{family}."):
            continue
        path = Path(gapped.__file__).parent.joinpath(*home.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == public:
                name, own, has_init = _read(node)
                if name is not None:
                    base = {} if has_init else known.get(ast.unparse(node.bases[0]), {})
                    known[public] = base | {key: own[key] for key in own if key not in _SHARED}
                    yield name, Member(public, ast.get_docstring(node) or "", known[public])


def _read(node: ast.ClassDef) -> tuple[str | None, dict[str, str], bool]:
    """The value of `name` in a class, its arguments with their defaults, and whether it has an `__init__`.

    Arguments are the fields of a dataclass, or those of `__init__`.
    """
    name, has_init = None, False
    values: list[tuple[str, ast.expr | None]] = []
    for each in node.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "name":
            name = str(ast.literal_eval(each.value))
        elif isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
            values.append((ast.unparse(each.target), each.value))
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            has_init, args = True, each.args
            # Defaults belong to the last of the arguments.
            named = [*args.args[len(args.args) - len(args.defaults) :], *args.kwonlyargs]
            defaults = [*args.defaults, *args.kw_defaults]
            values += zip((argument.arg for argument in named), defaults, strict=True)
    return name, {key: str(ast.literal_eval(value)) for key, value in values if value is not None}, has_init


def _description(name: str, members: dict[str, Member]) -> str:
    """An estimator with a paragraph for each of its options, in lines of 80 characters."""
    kind_of(dict.fromkeys(members, type), name)
    public, help_, options = members[name]

    def holder() -> None: ...

    holder.__doc__ = help_
    section = (describing(ARGUMENTS)(holder).__doc__ or "").partition("Arguments:\n")[2].partition("\n\n")[0]
    about = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, flags=re.M))
    mark = ", the default" if name == DEFAULT else ""
    lines = [f"{name}{mark}: {help_.partition(chr(10))[0]}", ""]
    for option, value in options.items():
        text = f"{option}={value}  {' '.join(about.get(option, '').split())}"
        lines.append(fill(text, 80, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False))
    given = {option: value for option, value in options.items() if value != "None"}
    lines += [""] * bool(options) + [f"As text    {name}{':' * bool(given)}{_spell(given)}"]
    return "\n".join([*lines, f"In Python  gapped.{public}"])


def properties(
    estimator: Annotated[list[str] | None, command.estimator_option("All")] = None,
    draws: Annotated[int, typer.Option(help="Samples per row of logits.")] = 4000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the logits and of the samples.")
    ] = 0,
) -> None:
    """Measure which of the paper's four properties hold.

    Each finding comes with its evidence, from random logits.

    \b
    Examples:
      gapped properties
      gapped properties --estimator gst:gap=0.0 --estimator decoupled:tau=0.5
    """
    import torch

    from gapped import registry
    from gapped.pathwise import Pathwise

    texts = estimator or list(registry.estimators("pathwise"))
    members = [registry.estimator(text) for text in texts]
    for i, member in enumerate(members):
        if not isinstance(member, Pathwise):
            known = ", ".join(registry.estimators("pathwise"))
            raise reject("estimator", texts[i], f"one whose sample carries the gradient: {known}")
        report = gapped.properties(member, draws=draws, generator=torch.Generator().manual_seed(seed))
        print("\n" * (i > 0) + str(report))
