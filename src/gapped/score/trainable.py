"""Estimators with parameters of their own, trained to lower the variance of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from gapped.checks import checkpoint_function, holds, in_eager_mode, is_integer
from gapped.errors import GappedError, reject
from gapped.score import Draws, Score

_T = TypeVar("_T")


class Trainable(torch.nn.Module, Score):
    """A score-function estimator that is a module: it has a state_dict, and parameters to be optimised.

    In training mode each call of `gapped.expectation` that estimates a gradient also leaves behind a loss for
    the estimator's own parameters, and nothing else: `variance_loss` hands it out.

    Under `torch.utils.checkpoint` a call counts once: with `use_reentrant=False` in the forward pass,
    with `use_reentrant=True`, where torch asks for no gradient before, in the backward pass. Function
    transforms such as `torch.func.grad` let no state out: they need the evaluation mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loss: Tensor | None = None
        self._slopes: dict[str, Tensor] = {}

    def forward(self, call: Callable[[], _T]) -> _T:
        """The result of `call`: for `torch.func.functional_call`, which puts other parameters in place."""
        return call()

    def variance_loss(self) -> Tensor:
        """The loss that calls of `gapped.expectation` left behind, a scalar; it can be taken once.

        It is the sum over all calls since it was last taken, so layers may share an estimator. Its gradient
        reaches this module's parameters alone, so it may be added to any other loss:
        `(gapped.expectation(f, logits, est).mean() + est.variance_loss()).backward()`.
        """
        loss, slopes = self.take_loss()
        for name, parameter in self.named_parameters():
            if name in slopes:
                # Adds a slope and exactly no value.
                loss = loss + ((parameter - parameter.detach()) * slopes[name]).sum()
        return loss

    def take_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The value of `variance_loss` and its slopes by the names of the parameters, in its place."""
        if self._loss is None:
            name = type(self).__name__
            raise GappedError(f"{name}.variance_loss: nothing to train on, call gapped.expectation before it")
        taken = self._loss, self._slopes
        self._loss, self._slopes = None, {}
        return taken

    def learns(self) -> bool:
        """Whether a call that estimates a gradient changes the state: in training mode."""
        if self.training and not torch.compiler.is_compiling() and not in_eager_mode():
            got = f"{type(self).__name__} in training mode, inside of a transform such as torch.func.grad"
            accepted = "one in evaluation mode, estimator.eval(): no state leaves a transform"
            raise reject("estimator", got, accepted)
        return self.training

    def is_trained(self) -> bool:
        """Whether the module is in training mode and has trainable parameters."""
        return self.learns() and any(parameter.requires_grad for parameter in self.parameters())

    def learn(self, estimate: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """The second result of `estimate`; of the first, some losses, the mean is added to `variance_loss`.

        Only the value and the slopes of the losses are kept, not the graph behind them.
        """
        losses: Tensor
        result: Tensor
        parameters: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if torch.compiler.is_compiling():  # it knows torch.func alone

            def mean_loss(values: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                losses, result = torch.func.functional_call(self, dict(values), (estimate,))
                return losses.mean(), (losses, result)

            slopes, (losses, result) = torch.func.grad(mean_loss, has_aux=True)(parameters)
        else:
            losses, result = estimate()
            if losses.numel() == 0:
                return result
            gradients = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
            slopes = {name: s for name, s in zip(parameters, gradients, strict=True) if s is not None}
        if losses.numel() and not is_recomputation():
            loss = losses.detach().mean()
            self._loss = loss if self._loss is None else self._loss + loss
            for name, slope in slopes.items():
                self._slopes[name] = slope.detach() + self._slopes.get(name, 0.0)
        return result

    def learn_from(self, draws: Draws, estimate: Callable[[], Tensor]) -> Tensor:
        """The gradient `estimate()`; in training, its mean squared norm is what `variance_loss` hands out."""

        def with_loss() -> tuple[Tensor, Tensor]:
            gradient = estimate()
            return gradient.square().flatten(draws.costs.dim() - 1).sum(-1), gradient

        with torch.enable_grad():
            gradient = self.learn(with_loss) if self.is_trained() else estimate()
        return gradient.detach()


def is_recomputation() -> bool:
    """Whether activation checkpointing runs a call again whose first run has counted."""
    return checkpoint_function() == "recompute_fn"


class Perceptron(torch.nn.Module):
    """One hidden layer, from all that an example has to one number; it learns its width at its first call.

    Its last layer starts at zero, so that an estimator starts as it would without the network.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inner: torch.nn.Module = torch.nn.LazyLinear(hidden)
        self.outer: torch.nn.Module = torch.nn.Linear(hidden, 1)
        for parameter in self.outer.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, x: Tensor, batch: torch.Size) -> Tensor:
        """Numbers of shape `batch` for `x` of shape `(*batch, ...)`."""
        return self.layers(x.flatten(len(batch))).squeeze(-1)

    def layers(self, x: Tensor) -> Tensor:
        # In the layers' own precision, whatever the caller's is.
        dtype = next(self.outer.parameters()).dtype
        y: Tensor = self.outer(torch.tanh(self.inner(x.to(dtype))))
        return y


def outputs(network: torch.nn.Module, x: Tensor, shape: torch.Size) -> Tensor:
    """One number of `network` for each entry of `shape`; a last axis of size 1 is dropped."""
    values: Tensor = network(x, shape) if isinstance(network, Perceptron) else network(x)
    values = values.squeeze(-1) if values.shape == (*shape, 1) else values
    if values.shape != shape:
        got, accepted = f"a result of shape {tuple(values.shape)}", f"one number each for {tuple(shape)}"
        raise reject("network", got, accepted)
    return values


def check_width(network: torch.nn.Module | None) -> None:
    """Raise where a perceptron would have to learn its width while a compiler or a transform follows."""
    if (
        isinstance(network, Perceptron)
        and isinstance(network.inner, torch.nn.LazyLinear)
        and not in_eager_mode()
    ):
        accepted = "one that an ordinary call has given its width, or a torch.nn.Module"
        raise reject("network", "a number of hidden units, inside of a transform or compiled", accepted)


def factor(name: str, value: object) -> Tensor:
    """The factor of a control variate as a tensor: any finite one, negative ones included."""
    if not isinstance(value, bool | str) and not (isinstance(value, Tensor) and value.requires_grad):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            level = torch.as_tensor(value, dtype=torch.get_default_dtype()).clone()
            if not holds(~level.isfinite()):
                return level
    raise reject(name, value, "a finite number or tensor, without gradient")


def network_of(network: torch.nn.Module | int) -> torch.nn.Module:
    """The network itself, or a perceptron with a hidden layer of this width."""
    if isinstance(network, torch.nn.Module):
        return network
    if not is_integer(network) or network < 1:
        raise reject("network", network, "a torch.nn.Module, or a number of hidden units")
    return Perceptron(network)
