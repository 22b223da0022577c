"""A router as a module: experts for each token, their gates and losses, and the way there and back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import (
    check_count,
    check_generator,
    check_level,
    check_mask,
    check_tensor,
    checkpoint_function,
    in_eager_mode,
    without_autocast,
)
from gapped.choices import Choices, Law, check_estimator, choose
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import is_differentiated, transformable, with_pull
from gapped.nn.layers import _MODE, Estimated
from gapped.pathwise import Pathwise
from gapped.texts import DEFAULT

Experts = Sequence[torch.nn.Module] | torch.nn.ModuleList | Callable[..., Tensor]


@dataclass(frozen=True)
class SparseMixer:
    """SparseMixer v2, as Phi-3.5-MoE has it: an estimator for `Router` alone.

    Arguments:
        jitter: Experts whose score s lies below the largest one s* by more than `2 jitter max(|s|, s*)` are
            left out of a draw.

    Experts are drawn one after the other, each from the softmax p of the scores that are left. The gate of
    expert i is p_i, or, where i is not the likeliest one, a third of it three times in four. Its gradient is
    that of p_i in both cases, which is Heun's rule of third order for the expected loss. In eval mode the
    likeliest experts are taken, with gates p_i.

    References: Liu, Dong, Liu, Yu, Gao (2023); Liu et al. (2024), GRIN.
    """

    jitter: float = 0.01

    def __post_init__(self) -> None:
        check_level("jitter", self.jitter, positive=False)

    def choose(
        self, logits: Tensor, k: int, draw: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Index and gates, `(*rows, k)`, of `k` experts: drawn, or the likeliest."""
        scores, indices, gates, laws = logits.detach(), [], [], []
        left, size = scores, scores.abs()
        for _ in range(k):
            top = left.amax(-1, keepdim=True)
            far = (top - scores) / size.maximum(top) > 2 * self.jitter
            near = left.masked_fill(far, -torch.inf)
            p = simplex.softmax(near)
            best = simplex.argmax_index(near)
            index = best
            if draw:
                index = simplex.inverse_cdf(p, generator) + p[..., 0].isnan()
            where = simplex.place(index, logits.shape[-1])
            gate = p.gather(-1, where).squeeze(-1)
            if draw:
                heavy = (index == best) | (simplex.uniform(gate.shape, gate, generator) > 0.75)
                # A third to four digits, as in the original.
                gate = gate - torch.where(heavy, 0.0, 0.6667 * gate)
            indices.append(index)
            gates.append(gate)
            laws.append(p)
            left = left.scatter(-1, where, -torch.inf)
        drawn, value = torch.stack(indices, -1), torch.stack(gates, -1)
        if is_differentiated(logits):
            value = with_pull(value, logits, _pull_mixed, drawn, torch.stack(laws, -2))
        return drawn, value


def _pull_mixed(grad: Tensor, like: Tensor, index: Tensor, laws: Tensor) -> Tensor:
    """The gradient of the logits by that of probabilities under `laws`, `(*rows, k, experts)`."""
    experts = laws.shape[-1]
    # Places without an expert have no gradient, whatever comes there.
    at = torch.where(index == experts, 0.0, grad.to(laws.dtype)).unsqueeze(-1)
    dense = torch.zeros_like(laws).scatter(-1, simplex.place(index, experts), at)
    return torch._softmax_backward_data(dense, laws, -1, laws.dtype).sum(-2).to(like.dtype)


@dataclass(frozen=True, eq=False)
class Routed:
    """Experts, gates and losses of tokens, and the way to the experts and back.

    A `gapped.nn.Router` returns it. With capacity, tokens are sent in blocks `(experts, places, d)`, one for
    each expert, whose empty places are zero. Without, as rows `(n, d)` in the order of their experts,
    `counts` for each.

    Arguments:
        index: The experts, `(*rows, k)`; a number that no expert has is none.
        gates: Their weights, `(*rows, k)`, which carry the gradient to the router. They are the softmax over
            the logits of the chosen experts, and sum to 1, except those of a `gapped.nn.SparseMixer`.
        logits: `(*rows, experts)`, -inf where the mask says so.
        load: How many tokens chose each expert, `(experts)`.
        counts: How many of them found a place, `(experts)`.
    """

    index: Tensor
    gates: Tensor
    logits: Tensor
    load: Tensor
    counts: Tensor
    _router: Router
    _choices: Choices | None
    _where: Tensor
    """The place of each slot, `(n, k)`: past the last one if it has none."""
    _source: Tensor
    """The slot of each place: past the last one if it is empty."""

    def __repr__(self) -> str:
        *rows, k = self.index.shape
        return f"Routed(tokens={tuple(rows)}, k={k}, experts={len(self.load)})"

    @property
    def balance(self) -> Tensor:
        """The load-balance loss: experts times the sum over them of share times mean probability.

        The share of an expert is that of the tokens' choices, without gradient. It is 1 where the load is
        even. Of a router with a `group`, shares are those of the tokens of all its processes, so that the
        gradient, averaged over them as DDP does, is the one of all tokens.
        """
        p, tokens = simplex.softmax(self.logits.flatten(0, -2)), self._exists.sum().clamp(min=1)
        share = self._router._total(self.load.to(p.dtype))
        return len(share) * (share / share.sum().clamp(min=1) * p.sum(0) / tokens).sum()

    @property
    def z(self) -> Tensor:
        """The z-loss: the mean over tokens of the squared logarithm of the sum of exponentials."""
        rows, exists = self.logits.flatten(0, -2), self._exists
        total = torch.where(exists.unsqueeze(-1), rows, 0.0).logsumexp(-1)
        return torch.where(exists, total, 0.0).square().sum() / exists.sum().clamp(min=1)

    @property
    def dropped(self) -> Tensor:
        """The share of choices that found no place."""
        return (self.load - self.counts).sum() / self.load.sum().clamp(min=1)

    def dispatch(self, hidden: Tensor) -> Tensor:
        """Send tokens `(*rows, d)` to their experts: `(experts, places, d)`, or `(n, d)` without capacity."""
        rows = self.index.shape[:-1]
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != rows:
            shape = tuple(getattr(hidden, "shape", ()))
            raise reject(
                "hidden", f"a {type(hidden).__name__} of shape {shape}", f"a Tensor of {tuple(rows)} tokens"
            )
        slots = self._source // self.index.shape[-1]
        sent: Tensor = _Take.apply(hidden.reshape(-1, hidden.shape[-1]), slots, self._where)  # type: ignore[no-untyped-call]
        return sent if self._router.capacity is None else sent.view(len(self.load), -1, hidden.shape[-1])

    def combine(self, outputs: Tensor) -> Tensor:
        """The sum of the experts' results for each token, times their gates: `(*rows, d)`.

        Arguments:
            outputs: In the form that `dispatch` has, of any width.
        """
        places = len(self._source)
        form = (places,) if self._router.capacity is None else (len(self.load), places // len(self.load))
        if outputs.shape[:-1] != form:
            raise reject("outputs", f"a tensor of shape {tuple(outputs.shape)}", f"{(*form, 'width')}")
        outputs = outputs.flatten(0, -2)
        back = self._source.unsqueeze(-1)
        found: Tensor = _Take.apply(outputs, self._where.flatten(), back)  # type: ignore[no-untyped-call]
        gates = self.gates.flatten(0, -2).unsqueeze(-1).to(outputs.dtype)
        total = (found.view(*self._where.shape, outputs.shape[-1]) * gates).sum(1)
        if self._router.others == "mean":
            total = total + self._others(outputs, gates)
        return total.view(*self.index.shape[:-1], outputs.shape[-1])

    def run(self, experts: Experts, hidden: Tensor) -> Tensor:
        """Each token through its experts.

        Arguments:
            experts: A list of modules, one for each expert; or a function, such as two products with stacked
                weights: of blocks `(experts, places, d)` with capacity, else of rows and `counts`.
            hidden: `(*rows, d)`.
        """
        sent = self.dispatch(hidden)
        has_blocks = sent.dim() == 3
        if not isinstance(experts, Sequence | torch.nn.ModuleList):
            inputs = (sent,) if has_blocks else (sent, self.counts)
            if in_eager_mode():
                _check_function(experts, len(inputs))
            return self.combine(experts(*inputs))
        if len(experts) != len(self.load):
            raise reject("experts", f"{len(experts)} of them", f"{len(self.load)}, as the router has")
        if has_blocks:
            parts: Sequence[Tensor] = sent.unbind()
        else:
            counts = self.counts.tolist()
            parts = torch.split(sent, [*counts, len(sent) - sum(counts)])
        results = [expert(part) for expert, part in zip(experts, parts, strict=False)]
        if has_blocks:
            return self.combine(torch.stack(results))
        return self.combine(torch.cat([*results, results[0].new_zeros(len(parts[-1]), results[0].shape[-1])]))

    @property
    def _exists(self) -> Tensor:
        """Which tokens may go somewhere."""
        return (self.logits.detach() != -torch.inf).any(-1).flatten()

    def _others(self, outputs: Tensor, gates: Tensor) -> Tensor:
        """Zero, whose gradient at each expert that a token has not chosen is of the mean of its results."""
        # A result that is infinite is no reason for others to be NaN.
        means = self._router._follow(self, outputs.detach()).to(outputs.dtype).nan_to_num(0.0, 0.0, 0.0)
        if self._choices is None:
            return outputs.new_zeros(())
        ones = self._choices.select(torch.eye(len(means), dtype=means.dtype, device=means.device))
        # Of the chosen ones `combine` has the gradient already.
        unchosen = (ones - ones.detach()) * (1 - ones.detach()) * gates.detach().view(*ones.shape[:-1], 1)
        return unchosen.sum(-2).flatten(0, -2) @ means


def _check_function(experts: Callable[..., Tensor], inputs: int) -> None:
    """Refuse a function that takes another number of arguments than the router has for it."""
    form = "f(rows, counts) without capacity" if inputs > 1 else "f(blocks) with capacity"
    try:
        signature(getattr(experts, "forward", experts)).bind(*[None] * inputs)
    except TypeError:
        raise reject("experts", "a function of other arguments", f"{form}, or a list of modules") from None
    except ValueError:  # a builtin, which has no signature
        return


@documented
class Router(Estimated):
    """Module that chooses the experts of each token in a mixture of experts.

    A linear map gives each token logits over the experts, in float32 under autocast as well. `k` of them are
    chosen, and the estimator sends a gradient to all; in eval mode they are the likeliest, without a gradient
    for the logits. A `gapped.nn.Routed` has indices, gates and losses, and takes tokens through modules of
    yours.

    Arguments:
        features: Length of a token.
        experts: How many experts there are.
        k: How many experts each token goes to.
        estimator: An object or its text, which draws experts unless it has `draw="argmax"`. None takes the
            likeliest, with the gradient of the default of `gapped.choose`. A `gapped.nn.SparseMixer` draws as
            Phi-3.5-MoE does.
        law: Of several experts, "subset" or "sequential", as in `gapped.choose`.
        capacity: How many places each expert has, in multiples of an even load; tokens that come too late go
            without it, and later tokens never displace earlier ones. None keeps all.
        others: Stands for the results of experts that a token did not choose in the gradient: "mean", a
            running mean of each expert's results, as Default-MoE has it, or "zero". None is "mean" for one
            expert, where it helps, but "zero" for several, where it does not, and for a SparseMixer. With
            "mean" results are as wide as tokens.
        group: Processes over which loads and running means are counted; None counts those of this one.

    Parameters of the module: `projection`, a `torch.nn.Linear` without bias. With running means the state
    dict has `means`, `(experts, features)`, and `updates`, how often each was updated.

    >>> router = Router(16, experts=4, capacity=1.25)
    >>> experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
    >>> x = torch.randn(2, 50, 16)
    >>> route = router(x)
    >>> y = route.run(experts, x)
    >>> loss = y.square().mean() + 0.01 * route.balance + 0.001 * route.z
    >>> y.shape, route.index.shape, route.dispatch(x).shape
    (torch.Size([2, 50, 16]), torch.Size([2, 50, 1]), torch.Size([4, 32, 16]))

    References: Fedus, Zoph, Shazeer (2022) for capacity and the load-balance loss; Zoph et al. (2022) for the
    z-loss; Panda et al. (2025) for Default-MoE.
    """

    decay = 0.99
    """How much of a running mean an update keeps; the first ones are plain averages."""

    means: Tensor
    updates: Tensor

    def __init__(
        self,
        features: int,
        experts: int,
        k: int = 1,
        *,
        estimator: Pathwise | SparseMixer | str | None = None,
        law: Law = "subset",
        capacity: float | None = None,
        others: Literal["mean", "zero"] | None = None,
        group: Any = None,
    ) -> None:
        for name, count in (("features", features), ("experts", experts), ("k", k)):
            check_count(name, count)
        if k > experts:
            raise reject("k", k, f"at most {experts}, the number of experts")
        if capacity is not None:
            check_level("capacity", capacity, positive=True)
        if law not in ("subset", "sequential"):
            raise reject("law", law, "'subset' or 'sequential'")
        if others not in (None, "mean", "zero"):
            raise reject("others", others, "'mean' or 'zero'")
        others = others or ("zero" if k > 1 or isinstance(estimator, SparseMixer) else "mean")
        # Before the estimator, which is checked against them.
        self.k, self.law, self.capacity, self.others, self.group = k, law, capacity, others, group
        super().__init__(estimator)
        self.projection = torch.nn.Linear(features, experts, bias=False)
        if others == "mean":
            self.register_buffer("means", torch.zeros(experts, features))
            self.register_buffer("updates", torch.zeros(experts))

    def _resolve(self, given: Any) -> Pathwise:
        self.sparse_mixer = given if isinstance(given, SparseMixer) else None
        if self.sparse_mixer and self.others == "mean":
            raise reject("others", "mean", "'zero' for a SparseMixer, whose rule counts them as zero")
        if given is None or self.sparse_mixer:
            given = f"{'reinmax' if self.k > 1 and self.law == 'subset' else DEFAULT}:draw=argmax"
        estimator = super()._resolve(given)
        check_estimator(estimator, self.k, self.law)
        return estimator

    @documented
    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Routed:
        """Draw the experts of each token.

        Arguments:
            hidden: Tokens, `(*rows, features)`.
            mask: Booleans that broadcast to `(*rows, experts)`: False where a token may not go to an expert.
                A token that may go nowhere, such as padding, gives zeros and counts nowhere.
        """
        accepted = f"(*rows, {self.projection.in_features})"
        check_tensor("hidden", hidden, accepted)
        if hidden.dim() < 2 or hidden.shape[-1] != self.projection.in_features:
            raise reject("hidden", f"a tensor of shape {tuple(hidden.shape)}", accepted)
        with without_autocast(hidden.device):
            weight = simplex.computed(self.projection.weight)
            logits = torch.nn.functional.linear(simplex.computed(hidden), weight)
        check_mask(mask, logits)
        check_generator(generator, logits)
        logits = simplex.masked(logits, mask)
        choices = None
        if self.sparse_mixer:
            index, gates = self.sparse_mixer.choose(logits, self.k, self.training, generator)
        else:
            estimator, given = (self.estimator, logits) if self.training else (_MODE, logits.detach())
            choices = choose(estimator, given, self.k, self.law, None, -1, None, generator)
            index, gates = choices.index, choices.weights()
        load, counts, where, source = self._plan(index.flatten(0, -2))
        return Routed(index, gates, logits, load, counts, self, choices, where, source)

    @torch.no_grad()
    def _plan(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load and counts of each expert, the place of each slot and the slot of each place."""
        slots, experts = index.numel(), self.projection.out_features
        every = torch.arange(slots, device=index.device)
        # A stable order: an earlier token is not displaced by a later one, which it must not know of.
        ordered, order = index.flatten().clamp(max=experts).sort(stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=index.device))
        load, is_sent, place, places = bounds.diff(), ordered < experts, every, slots
        counts = load
        if self.capacity is not None:
            # A number that compiled code has fixed, like the shapes that it gives.
            each = operator.index(math.ceil(min(self.capacity * slots / experts, len(index))))
            rank = every - bounds[ordered]
            is_sent, place, places = is_sent & (rank < each), ordered * each + rank, experts * each
            counts = load.clamp(max=each)
        # One place more than there are takes what is not sent.
        place = torch.where(is_sent, place, places)
        source = torch.full((places + 1,), slots, device=index.device).scatter(0, place, order)[:-1]
        where = torch.empty_like(order).scatter(0, order, torch.where(is_sent, place, slots + places))
        return load, counts, where.view_as(index), source

    def _total(self, values: Tensor) -> Tensor:
        """The sum of values over the processes of the group."""
        if self.group is None:
            return values
        torch.distributed.all_reduce(total := values.clone(), group=self.group)
        return total

    @torch.no_grad()
    def _follow(self, route: Routed, outputs: Tensor) -> Tensor:
        """The running means, brought up to date in training mode with the results of a batch."""
        if outputs.shape[-1] != self.means.shape[-1]:
            accepted = f"{self.means.shape[-1]} features, as the running means have, or others='zero'"
            raise reject("outputs", f"a tensor of shape {tuple(outputs.shape)}", accepted)
        if self.training and checkpoint_function() is None:
            if torch._C._are_functorch_transforms_active():
                got = "'mean' in training mode, inside of a transform such as torch.func.grad"
                raise reject("others", got, "'zero', or evaluation mode: no state leaves a transform")
            is_sent = (route._source < route.index.numel()).unsqueeze(-1)
            found = torch.where(is_sent, outputs, 0.0).to(self.means.dtype)
            if self.capacity is None:
                owner = route.index.flatten()[route._source.clamp(max=len(is_sent) - 1)]
                sums = torch.zeros_like(self.means).index_add_(0, owner.clamp(max=len(self.means) - 1), found)
            else:
                sums = found.view(len(self.means), -1, outputs.shape[-1]).sum(1)
            sums, counts = self._total(sums), self._total(route.counts.to(sums.dtype))
            rate = (1 / (self.updates + 1)).clamp(min=1 - self.decay) * (counts > 0)
            self.means.lerp_(sums / counts.clamp(min=1).unsqueeze(-1), rate.unsqueeze(-1))
            self.updates.add_(counts > 0)
        # A copy: the next batch changes the means before this one's backward pass, perhaps.
        return self.means.clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            # In half precision an update of a hundredth would be lost.
            if (now := getattr(self, name)).dtype != simplex.computed(now).dtype:
                setattr(self, name, buffer.to(now.device))
        return self

    def extra_repr(self) -> str:
        estimator = self.sparse_mixer or self.estimator
        return f"k={self.k}, estimator={estimator}, capacity={self.capacity}, others={self.others!r}"


@transformable
class _Take(torch.autograd.Function):
    """Rows of a matrix by their number, zero where there is none; `back` has the results of each row."""

    @staticmethod
    def forward(values: Tensor, index: Tensor, back: Tensor) -> Tensor:
        if len(values) == 0:
            return values.new_zeros(len(index), values.shape[-1])
        taken = values.index_select(0, index.clamp(max=len(values) - 1))
        return taken.masked_fill_((index >= len(values)).unsqueeze(-1), 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        taken = _Take.forward(grad, back.flatten(), back)
        return taken.view(*back.shape, grad.shape[-1]).sum(1), None, None
