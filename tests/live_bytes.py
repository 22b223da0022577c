"""The bytes of all tensors that a program holds at a time, counted operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):
    """Counts storages that operators return, each once and as long as it lives."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.peak = known, 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {place: entry for place, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def peak_of(call: Callable[[], object], *known: Tensor) -> int:
    """The most bytes that `call` holds at one time beyond the `known` tensors. Its results count."""
    with _Counter({each.untyped_storage().data_ptr() for each in known}) as counter:
        result = call()
    del result
    return counter.peak


def bytes_of(*tensors: Tensor) -> int:
    return sum(each.nbytes for each in tensors)


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that autograd keeps, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(kept.values())
