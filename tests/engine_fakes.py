"""Ray as far as the engines use it, in one process and without delay."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any


class Answer:
    """The answer of an actor: a reference to what it returned."""

    def __init__(self, method: Any, *arguments: Any) -> None:
        self.value = method(*arguments)

    def future(self) -> Any:
        return SimpleNamespace(result=lambda: self.value)


class FakeRay:
    """As much of Ray as is used, in this process and without delay."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    cloudpickle = SimpleNamespace(dumps=lambda value: value, loads=lambda value: value)

    def __init__(self, gpus: int = 0) -> None:
        self.options: list[dict[str, Any]] = []
        self.gpus, self.up = gpus, False
        self.lost: list[Any] = []

    def init(self, *address: str, **_: Any) -> None:
        self.up = True

    def is_initialized(self) -> bool:
        return self.up

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, int]:
        return {"CPU": 2, **({"GPU": self.gpus} if self.gpus else {})}

    def remote(self, **options: Any) -> Any:
        self.options.append(options)
        return lambda what: SimpleNamespace(remote=partial(self._start, what))

    def _start(self, what: Any, *arguments: Any) -> Any:
        if not isinstance(what, type):
            return partial(what, *arguments)
        actor = what(*arguments)
        methods = [name for name in vars(what) if not name.startswith("_")]
        calls = {name: SimpleNamespace(remote=partial(Answer, getattr(actor, name))) for name in methods}
        return SimpleNamespace(**calls)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def put(self, value: Any) -> Any:
        return value

    def cancel(self, reference: Any, force: bool) -> None:
        self.lost.append(reference)

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Answer):
            return reference.value
        return reference()
