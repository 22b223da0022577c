"""What tells one training function from another: its name, and a hash of all that it can be seen to use."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapped.comparison.records import derived_hash
from gapped.score.trainable import Trainable

# Values that their `repr` tells in full.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, bytearray, type(None), range, slice)
_PLAIN += (PurePath, np.generic, torch.dtype, torch.device)
# Of a class: what it was defined with. The rest, such as caches, may change while a program runs.
_MEMBERS = (*_PLAIN, tuple, list, dict, Set, Tensor, np.ndarray, Namespace, SimpleNamespace, type)
_MEMBERS += (FunctionType, staticmethod, classmethod, property, type(functools.lru_cache(int)))
_MEMBERS += (functools.cached_property, functools.partial, functools.partialmethod)
_PLACES = {"__module__", "__doc__", "__firstlineno__", "__qualname__"}
_INSTALLED = {"site-packages", "dist-packages"}
# A checkout of gapped is as installed, wherever it lies.
_GAPPED = Path(__file__).parents[1]


def definition(train: Callable[..., Any]) -> Any:
    """What has the name of a training function: itself, what it is a partial of, or its class."""
    inner: Any = train.func if isinstance(train, functools.partial) else train
    return inner if hasattr(inner, "__qualname__") else type(inner)


def name_of(train: Callable[..., Any]) -> str:
    """Its file and its own name, "file.train": the same in a script, by `python -m`, and imported."""
    home = definition(train)
    module, file = _module(home.__module__)
    # Jupyter says where a notebook lies.
    notebook = os.environ.get("JPY_SESSION_NAME", "") if module == "__main__" else f"{module}.py"
    path = file or Path(notebook)
    last = path.parent.name if path.stem in ("__main__", "__init__") else path.stem
    return f"{last}.{home.__qualname__}".lstrip(".")


def fingerprint(value: Any, train: Callable[..., Any]) -> str:
    """A hash of a value, and of all that it can be seen to use in the file or the package of `train`.

    Seen are: code of functions and classes there, without comments; defaults, closures and bound arguments;
    the values of global names, tensors among them; modules there, by the content of their files. Not seen are
    installed packages, data in files, the environment, weights of networks, names that are looked up while
    the function runs, and the state of objects whose class is from elsewhere.
    """
    walk, queue, texts = _Walk(train), [value], []
    for each in queue:
        text, inner = walk.step(each)
        texts.append(f"{type(each).__qualname__} {len(inner)} {text}")
        queue += inner
    return derived_hash(*texts)


def _module(name: str | None) -> tuple[str, Path | None]:
    """The name that a module has when it is imported, and its file."""
    module = sys.modules.get(name or "")
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    return str(getattr(spec, "name", name)), Path(file).absolute() if file else None


@dataclass(frozen=True)
class _File:
    """A module, by the content of its file."""

    path: Path


class _Walk:
    """From a value to the values that it consists of or uses; each object once."""

    def __init__(self, train: Callable[..., Any]) -> None:
        self.home = definition(train).__module__
        name, file = _module(self.home)
        above = name.count(".") - (file is None or file.stem != "__init__")
        # Of a package its folder, else the folder of the file.
        self.root = file.parents[max(above, 0)] if file else Path.cwd()
        self.places: dict[Any, int] = {}
        self.kept: list[Any] = []

    def step(self, value: Any) -> tuple[str, list[Any]]:
        """A text, and further values: together they differ where values do."""
        if isinstance(value, _PLAIN):
            return repr(value), []
        if isinstance(value, tuple | Set):
            return "", list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        key = value if isinstance(value, _File) else id(value)
        if key in self.places:
            return str(self.places[key]), []
        self.places[key] = len(self.places)
        # While it is kept, no other object gets its number.
        self.kept.append(value)
        if isinstance(value, Tensor | np.ndarray):
            return _array(value)
        if isinstance(value, FunctionType):
            return value.__qualname__, list(self.function(value))
        if isinstance(value, type):
            return value.__qualname__, list(self.members(value)) if self.is_own(value) else []
        if isinstance(value, CodeType):
            return _text(value), list(self.used(value, {}))
        if isinstance(value, _File):
            return self.file(value.path)
        if isinstance(value, torch.nn.Module):
            # Not the weights of networks, which start at random: the same call must go on where it was.
            own = value.named_parameters(recurse=False) if isinstance(value, Trainable) else ()
            return repr(value), [type(value), dict(own)]
        return "", list(self.parts(value))

    def parts(self, value: Any) -> Iterator[Any]:
        """What an object consists of. Of one that nothing is known of, nothing."""
        if isinstance(value, list):
            yield from value
        elif isinstance(value, Mapping):
            yield from (each for pair in value.items() for each in pair)
        elif isinstance(value, ModuleType):
            yield _File(Path(getattr(value, "__file__", None) or value.__name__))
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, property):
            yield from (value.fget, value.fset)
        elif isinstance(value, functools.partial | functools.partialmethod):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, functools.cached_property):
            yield value.func
        elif hasattr(value, "__wrapped__"):
            yield value.__wrapped__
        elif is_dataclass(value):
            yield from (type(value), *(getattr(value, each.name, None) for each in fields(value)))
        elif isinstance(value, Namespace | SimpleNamespace) or self.is_own(type(value)):
            yield from (type(value), getattr(value, "__dict__", None))
            state = object.__getstate__(value)
            yield from state[1:] if isinstance(state, tuple) else ()

    def function(self, function: FunctionType) -> Iterator[Any]:
        if self.is_own(function):
            yield _text(function.__code__)
            used = self.used(function.__code__, function.__globals__)
            yield from (each for each in used if each is not function.__doc__ or each is None)
            yield from (function.__defaults__, function.__kwdefaults__)
            empty = type(function.__closure__[0])() if function.__closure__ else None
            yield from (cell.cell_contents for cell in function.__closure__ or () if cell != empty)
        yield getattr(function, "__wrapped__", None)

    def members(self, kind: type) -> Iterator[Any]:
        yield from kind.__bases__
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, _MEMBERS) and name not in _PLACES:
                yield from (name, value)

    def used(self, code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
        """The constants of code, the values of its global names, and what it imports."""
        home = Path(code.co_filename).absolute().parent
        for each in code.co_consts:
            yield from self.used(each, names) if isinstance(each, CodeType) else (each,)
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not each.argval.startswith("__"):
                yield from (names[name] for name in (each.argval,) if name in names)
            elif each.opname in ("IMPORT_NAME", "IMPORT_FROM"):
                for folder in (home, self.root, self.root.parent):
                    path = folder.joinpath(*each.argval.split("."))
                    files = path.with_name(f"{path.name}.py"), path / "__init__.py"
                    yield from (_File(file) for file in files if self.contains(file) and file.is_file())

    def file(self, path: Path) -> tuple[str, list[Any]]:
        if not self.contains(path) or path.suffix != ".py":
            return path.stem, []
        content = path.read_bytes()
        try:
            code = compile(content, str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return _digest(content), []
        return _text(code), list(self.used(code, {}))

    def is_own(self, value: Any) -> bool:
        """Whether a function or a class is from the file or package of `train`, or typed in where it was."""
        file = _module(value.__module__)[1]
        return value.__module__ == self.home or (file is not None and self.contains(file))

    def contains(self, path: Path) -> bool:
        inside = path.is_relative_to(self.root) and not path.is_relative_to(_GAPPED)
        return inside and not _INSTALLED.intersection(path.relative_to(self.root).parts)


def _text(code: CodeType) -> str:
    """What code does, whatever line it stands in; constants apart."""
    inner = [_text(each) for each in code.co_consts if isinstance(each, CodeType)]
    names = [*code.co_names, *code.co_varnames, *code.co_freevars]
    return " ".join([code.co_code.hex(), code.co_exceptiontable.hex(), *names, *inner])


def _array(value: Tensor | np.ndarray[Any, Any]) -> tuple[str, list[Any]]:
    if isinstance(value, Tensor) and value.is_nested:
        return "", list(value.unbind())
    form = f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        whole = value.dtype != object
        return (form + _digest(value.tobytes()), []) if whole else (form, value.tolist())
    if value.is_meta:
        return form, []
    if value.layout is not torch.strided:
        value = value.to_dense()
    # As bytes, since NumPy lacks some of torch's formats.
    flat = value.detach().cpu().contiguous().resolve_conj().reshape(-1)
    return form + _digest(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""), []


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
