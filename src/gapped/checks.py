"""Checks of arguments, in the public functions: each error names what came and what is accepted."""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from gapped.errors import MissingExtra, reject

# The floor of the extra in pyproject.toml does not bind a torch that was installed without it.
LEAST_TORCH = (2, 10)
if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
    least = ".".join(map(str, LEAST_TORCH))
    raise MissingExtra(
        f'gapped needs torch {least}, found {torch.__version__}: pip install -U "gapped[torch]"'
    )

# Temperatures and gaps outside float32's normal range are rejected: 1/x of a subnormal overflows.
_FLOAT32 = torch.finfo(torch.float32)


def check_flag(name: str, flag: object) -> None:
    """Check an option that is either on or off."""
    if not isinstance(flag, bool):
        raise reject(name, flag, "True or False")


def check_count(name: str, count: object, least: int = 1) -> None:
    """Check a whole number that has a least value."""
    if not is_integer(count) or count < least:
        accepted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise reject(name, count, accepted)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether this is a whole number, numpy's included."""
    return isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)


def check_level(name: str, level: object, *, positive: bool, learned: bool = False) -> None:
    """Check a temperature or a gap: a number in float32's range, or a tensor of such numbers.

    Only one that can be `learned` may require a gradient. Values inside a tensor are checked on the CPU only:
    on a GPU that would wait for the device.
    """
    accepted = "a positive number or tensor" if positive else "a non-negative number or tensor"
    if isinstance(level, Tensor):
        constant = learned or not (requires_grad(level) or has_tangent(level))
        if level.dtype == torch.bool or level.is_complex() or not constant:
            kind = f"a tensor of dtype {level.dtype}" + ("" if constant else " that requires grad")
            raise reject(name, kind, f"{accepted}, real" + ("" if learned else " and without gradient"))
        # In half precision the limits would be rounded away.
        level = level.to(torch.promote_types(level.dtype, torch.float32))
        if holds(~((level >= (_FLOAT32.tiny if positive else 0.0)) & (level <= _FLOAT32.max))):
            raise reject(name, "a tensor with values out of range", accepted)
    # Comparisons alone: compiled code cannot inspect a changing number otherwise.
    elif not _is_number(level) or not level >= 0 or (positive and level == 0):
        raise reject(name, level, accepted)
    elif level > _FLOAT32.max or (positive and level < _FLOAT32.tiny):
        raise reject(name, level, f"{accepted} in the range of float32")


def ignore_eps(eps: object) -> None:
    """Accept the argument `eps` of `F.gumbel_softmax`, and warn as torch does where it is given."""
    if eps != 1e-10:
        warnings.warn("`eps` is accepted as in torch and has no effect", stacklevel=3)


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    extra = len(target) - len(shape)
    return extra >= 0 and all(n in (1, m) for n, m in zip(shape, target[extra:], strict=True))


ROWS = "the logits' shape without the category axis"
GATES = "the logits' shape"


def check_fit(name: str, level: object, target: tuple[int, ...], meaning: str) -> None:
    """Check that an option that is a tensor broadcasts to `target`; `meaning` says what that is."""
    if isinstance(level, Tensor) and not broadcasts(tuple(level.shape), tuple(target)):
        accepted = f"a shape that broadcasts to {tuple(target)}, {meaning}"
        raise reject(name, f"a tensor of shape {tuple(level.shape)}", accepted)


def _is_number(level: object) -> TypeGuard[float]:
    # Old compilers support only tuples of classes here. The last one is for numpy's scalars.
    return isinstance(level, (int, float, numbers.Real)) and not isinstance(level, bool)


def in_eager_mode() -> bool:
    """Whether this is neither compiled or traced nor inside of a function transform such as vmap."""
    return not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
    )


def batched_with(value: Tensor, *others: Any) -> Tensor:
    """`value`, bit for bit, with every axis that vmap hides in one of the `others` that are tensors.

    What a backward rule keeps must have no hidden axis that the value has not: the incoming gradient would
    be summed over that axis before the rule sees it.
    """
    if in_eager_mode():
        return value
    for other in others:
        if isinstance(other, Tensor):
            # Both branches are the value: adding a zero would change -0.0.
            value = torch.where(other.new_zeros((), dtype=torch.bool), value, value)
    return value


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is enabled for a device; some, such as "meta", have none."""
    is_anywhere = torch._C._is_any_autocast_enabled()
    return (
        is_anywhere
        and torch.amp.is_autocast_available(device.type)
        and torch.is_autocast_enabled(device.type)
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """No autocast inside; entering its context where it is off would take the host as long as a launch."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def requires_grad(tensor: Tensor) -> bool:
    """Whether a gradient is wanted for `tensor`, at whichever level of function transforms.

    Inside of vmap a tensor itself says no, also where the one that it stands for is differentiated outside.
    """
    if tensor.requires_grad or in_eager_mode() or torch.compiler.is_compiling():
        return tensor.requires_grad
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def has_tangent(tensor: Tensor) -> bool:
    """Whether a forward-mode derivative by `tensor` is wanted, at whichever level of function transforms."""
    if torch.compiler.is_compiling() or (forward_ad._current_level < 0 and in_eager_mode()):
        return False
    while True:
        # vmap has no rule for the question, so what it batches is asked.
        while functorch.is_batchedtensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            return True
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)


def nodes_of(tensor: Tensor) -> set[Node]:
    """The nodes of the graph that `tensor` comes from, one for each level of function transforms."""
    nodes = {tensor.grad_fn}
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        nodes.add(tensor.grad_fn)
    return {node for node in nodes if node is not None}


def depends_on(result: Tensor, sources: set[Node]) -> bool:
    """Whether the graph of `result` leads to one of these nodes."""
    # Later nodes have higher numbers, so what is older than the sources cannot lead to them. Other threads
    # count by themselves: before the answer is no, all nodes are searched.
    oldest = min((node._sequence_nr() for node in sources), default=0)
    return _leads_to(result, sources, oldest) or _leads_to(result, sources, 0)


def _leads_to(result: Tensor, sources: set[Node], oldest: int) -> bool:
    seen = nodes_of(result)
    ahead = list(seen)
    while ahead:
        node = ahead.pop()
        if node in sources:
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in seen and before._sequence_nr() >= oldest:
                seen.add(before)
                ahead.append(before)
    return False


def may_decide(values: Tensor) -> bool:
    """Whether Python may branch on these values without synchronising a GPU or breaking a trace."""
    is_recorded = torch.compiler.is_compiling() or torch._C._is_tracing()
    return values.device.type == "cpu" and not is_recorded and not _unseen.get()


def holds(condition: Tensor) -> bool:
    """Whether a CPU tensor is true anywhere; False where its values must not decide anything."""
    if not may_decide(condition):
        return False
    try:
        return bool(condition.any())
    except RuntimeError:  # under vmap
        return False


def is_known_finite(values: Tensor) -> bool:
    """Whether a CPU tensor holds finite numbers alone; False where its values must not decide anything."""
    if values.device.type != "cpu" or not in_eager_mode():
        return False
    try:
        return math.isfinite(values.sum())
    except RuntimeError:  # a fake tensor has no values
        return False


_unseen: ContextVar[bool] = ContextVar("_unseen", default=False)


@contextmanager
def values_unseen() -> Iterator[None]:
    """Skip checks of values, as on a GPU.

    Where several runs train in one program, the NaN of one must not end the others. The checks stand in all
    parts of the library, so their switch stands here.
    """
    token = _unseen.set(True)
    try:
        yield
    finally:
        _unseen.reset(token)


def check_tensor(name: str, value: object, accepted: str) -> Tensor:
    """The value, once it is checked that it is a tensor."""
    if isinstance(value, Tensor):
        return value
    if type(value).__module__ == "torch.fx.proxy":
        accepted += "; for torch.fx, wrap the function with torch.fx.wrap or make the module a leaf"
    raise reject(name, f"an object of type {type(value).__name__}", accepted)


def check_scores(logits: object, accepted: str = "a dense floating-point tensor of log-odds") -> Tensor:
    """The logits, once it is checked what kind of tensor they are."""
    logits = check_tensor("logits", logits, accepted)
    if not logits.is_floating_point():
        raise reject("logits", f"a tensor of dtype {logits.dtype}", accepted)
    if logits.layout != torch.strided or logits.is_nested:
        raise reject("logits", "a nested tensor" if logits.is_nested else f"one of {logits.layout}", accepted)
    return logits


def check_logits(logits: object, dim: object = -1) -> None:
    """Check logits and their category axis."""
    accepted = "a dense floating-point tensor of scores, one per category"
    logits = check_scores(logits, accepted)
    if logits.dim() == 0:
        raise reject("logits", "a tensor without any axis", accepted)
    if not is_integer(dim) or not -logits.dim() <= dim < logits.dim():
        raise reject("dim", dim, f"an axis of logits of shape {tuple(logits.shape)}")
    # In a trace a length is a tensor, and asking it would warn that the trace keeps the answer.
    is_traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
    if not is_traced and logits.shape[dim] == 0:
        raise reject(
            "logits", f"a tensor of shape {tuple(logits.shape)} with dim={dim}", "at least one category"
        )


def check_mask(mask: object, logits: Tensor, dim: int = -1) -> None:
    """Check a mask of the categories that exist, which lie on axis `dim` of the logits."""
    if mask is None:
        return
    accepted = f"a boolean tensor that broadcasts to the logits' shape {tuple(logits.shape)}"
    mask = check_tensor("mask", mask, accepted)
    if mask.dtype != torch.bool:
        raise reject("mask", f"a tensor of dtype {mask.dtype}", f"{accepted}, as mask != 0 is")
    if not broadcasts(tuple(mask.shape), tuple(logits.shape)):
        hint = "; for a row as a whole take mask.unsqueeze(-1)" * (mask.shape == logits.shape[:-1])
        raise reject("mask", f"a tensor of shape {tuple(mask.shape)}", accepted + hint)
    if mask.dim() < logits.dim() and dim not in (-1, logits.dim() - 1):
        # Broadcasting would take its last axis for the logits' last one, which is not that of the categories.
        accepted = f"one with all {logits.dim()} axes of the logits, since dim={dim} is not the last of them"
        raise reject("mask", f"a tensor of shape {tuple(mask.shape)}", accepted)


def check_generator(generator: object, logits: Tensor) -> None:
    """Check the source of randomness."""
    if generator is None:
        return
    accepted = f"a torch.Generator on {logits.device.type}, or None"
    if not isinstance(generator, torch.Generator):
        raise reject("generator", generator, accepted)
    if generator.device.type != logits.device.type:
        raise reject("generator", f"one on {generator.device.type}", accepted)
    if checkpoint_function() is not None:
        accepted = "None: checkpoint repeats the draws of torch's default generator alone"
        raise reject("generator", "a torch.Generator under torch.utils.checkpoint", accepted)


def checkpoint_function() -> str | None:
    """The function of activation checkpointing that runs a forward pass again; None if none does.

    In a backward pass the innermost one tells: `recompute_fn` is that of `use_reentrant=False`, `backward`
    that of `use_reentrant=True`, whose first run was without gradient.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        in_checkpoint = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        if in_checkpoint and name in ("recompute_fn", "backward"):
            return name
        frame = frame.f_back
    return None


def check_table(table: object, logits: torch.Size) -> bool:
    """Check a table for logits of this shape, and return whether it has one for each group of them.

    Grouped tables have at least three axes, the first two equal to the last two of the logits.
    """
    shape, last = tuple(getattr(table, "shape", ())), tuple(logits[-2:])
    is_grouped = len(shape) >= 3 and shape[:2] == last
    if not isinstance(table, Tensor) or not (is_grouped or shape[:1] == last[-1:]):
        accepted = f"a tensor with {last[-1]} rows, one per category"
        if len(last) == 2:
            accepted += f", or of shape ({last[0]}, {last[1]}, ...) with a table for each group"
        is_tensor = isinstance(table, Tensor)
        got = f"a tensor of shape {shape}" if is_tensor else f"an object of type {type(table).__name__}"
        if isinstance(getattr(table, "weight", None), Tensor):
            accepted += "; perhaps its weight"
        raise reject("table", got, accepted)
    if not table.is_floating_point():
        accepted = "a floating-point tensor; table[choice.index] has no gradient for the logits"
        raise reject("table", f"a tensor of {table.dtype}", accepted)
    return is_grouped


def check_linear(hidden: object, weight: object, bias: object) -> torch.dtype:
    """Check a linear layer, and return the dtype of its product: what autocast says, if it is enabled."""
    # Decoding asks this for each token: the common case is seen at once.
    if bias is None and isinstance(hidden, Tensor) and isinstance(weight, Tensor):
        tensors, dtype, device = (hidden, weight), hidden.dtype, hidden.device
        is_dense = all(each.layout == torch.strided and not each.is_nested for each in tensors)
        is_alike = dtype == weight.dtype and dtype.is_floating_point and device == weight.device
        fits = hidden.dim() > 0 and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
        if is_dense and is_alike and fits and weight.shape[0] > 0 and not is_autocast(device):
            return dtype
    for name, value, dims in (("hidden", hidden, None), ("weight", weight, 2), ("bias", bias, 1)):
        if value is None and name == "bias":
            continue
        shape = {None: "(..., d)", 2: "(V, d)", 1: "(V)"}[dims]
        accepted = f"a dense floating-point tensor of shape {shape}"
        value = check_tensor(name, value, accepted)
        if not value.is_floating_point() or value.layout != torch.strided or value.is_nested:
            raise reject(name, f"a tensor of {value.dtype}, {value.layout}", accepted)
        if value.dim() == 0 or dims not in (None, value.dim()) or (dims and len(value) == 0):
            raise reject(name, f"a tensor of shape {tuple(value.shape)}", f"{accepted}, V at least 1")
    assert isinstance(hidden, Tensor)
    assert isinstance(weight, Tensor)
    if weight.shape[1] != hidden.shape[-1]:
        accepted = f"(V, {hidden.shape[-1]}) as hidden has {hidden.shape[-1]} features"
        raise reject("weight", f"a tensor of shape {tuple(weight.shape)}", accepted)
    if isinstance(bias, Tensor) and bias.shape != weight.shape[:1]:
        raise reject("bias", f"a tensor of shape {tuple(bias.shape)}", f"{tuple(weight.shape[:1])}")
    return _dtype_of_product(hidden, weight, bias if isinstance(bias, Tensor) else weight)


def _dtype_of_product(hidden: Tensor, weight: Tensor, bias: Tensor) -> torch.dtype:
    for name, value in (("weight", weight), ("bias", bias)):
        if value.device != hidden.device:
            raise reject(name, f"a tensor on {value.device}", f"one on {hidden.device}, as hidden")
    dtypes = {hidden.dtype, weight.dtype, bias.dtype}
    if is_autocast(hidden.device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(hidden.device.type)
    for name, value in (("weight", weight), ("bias", bias)):
        if value.dtype != hidden.dtype:
            raise reject(name, f"a tensor of {value.dtype}", f"one of {hidden.dtype}, as hidden")
    return hidden.dtype


_used: str | None = None


def backend_used() -> str | None:
    """The backend that drew the last sample outside of compiled code.

    Returns:
        "torch" or "triton"; None if nothing was drawn yet.
    """
    return _used


def note_backend(name: str) -> None:
    """Remember which backend drew the last sample."""
    global _used
    if not torch.compiler.is_compiling():
        _used = name
