"""A choice from a linear head with `backend="triton"`: the kernels run on the logits of each chunk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_equal, normal
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, LONG
from live_bytes import bytes_of, peak_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gapped
from gapped.kernels.sampling import launch
from gapped.vocabulary import head as sizes

pytestmark = GPU_MARKS
# A choice has no path through GST's perturbation.
CHOOSING = [name for name, estimator in ESTIMATORS.items() if getattr(estimator, "detach", True)]
SLOW = ("gumbel-rao", "decoupled", "reinmax")


@pytest.mark.slow_if(lambda name: name in SLOW)
@pytest.mark.parametrize("name", CHOOSING)
def test_a_chunk_of_short_rows_is_the_choice_of_its_logits(name: str) -> None:
    """The key of the only chunk is the one that `choose` draws. Long rows are cut into several below."""
    estimator = replace(ESTIMATORS[name], backend="triton")
    shapes = ((3, 4), (7, 4), (7,))
    results: list[list[Tensor]] = []
    for is_linear in (True, False):
        hidden, weight, bias = (
            normal(*s, seed=n, dtype=torch.float32).to(DEVICE).requires_grad_() for n, s in enumerate(shapes)
        )
        generator = torch.Generator(DEVICE).manual_seed(1)
        if is_linear:
            choice = estimator.choose_linear(hidden, weight, bias, generator=generator)
        else:
            choice = estimator.choose(hidden @ weight.T + bias, generator=generator)
        assert gapped.backend_used() == "triton"
        rows, gates = choice.select(weight), choice.gate()
        cost = rows.square().sum() + (gates * rows.detach()[:, 0]).sum()
        results.append([choice.index, rows, *torch.autograd.grad(cost, [hidden, weight, bias])])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)


# Enough rows and categories for several spans of several parts.
ROWS, CATEGORIES, WIDTH = (2, 3), 4100, 4


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for five rows of float32 logits; a span has the four that fit into a table's gradient."""
    monkeypatch.setattr(sizes, "MEMORY", 5 * 4 * CATEGORIES)
    monkeypatch.setattr(sizes, "MARGIN", 2 * 4 * CATEGORIES)
    monkeypatch.setattr(sizes, "TILE", 1)


def head(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states, weight, bias and table, leaves."""
    shapes = ((*ROWS, WIDTH), (CATEGORIES, WIDTH), (CATEGORIES,), (CATEGORIES, WIDTH))
    return [
        normal(*s, seed=n, dtype=torch.float32).to(DEVICE, dtype).requires_grad_()
        for n, s in enumerate(shapes)
    ]


MASKS = {
    "shared": torch.arange(CATEGORIES) % 3 > 0,
    "per batch": normal(ROWS[0], 1, CATEGORIES, seed=9) > -0.5,
    "per row": normal(*ROWS, CATEGORIES, seed=9) > -0.5,
}


@pytest.mark.slow_if(lambda name, mask: name in SLOW)
@pytest.mark.usefixtures("small_spans")
@pytest.mark.parametrize(
    ("name", "mask"), [*((name, None) for name in LONG), *(("gst", mask) for mask in MASKS)]
)
def test_any_division_into_chunks_gives_the_choice_of_all_logits(name: str, mask: str | None) -> None:
    """All rows share a key, and the noise of a row depends on its number alone."""
    # The interpreter takes as long for each draw as for a sample.
    options = {"samples": 2} if name == "gumbel-rao" else {}
    estimator = replace(ESTIMATORS[name], backend="triton", **options)
    exists = None if mask is None else MASKS[mask].to(DEVICE)
    results: list[list[Tensor]] = []
    for is_linear in (True, False):
        hidden, weight, bias, table = leaves = head()
        generator = torch.Generator(DEVICE).manual_seed(1)
        if is_linear:
            choice = estimator.choose_linear(hidden, weight, bias, mask=exists, generator=generator)
            log_prob, entropy = choice.log_prob, choice.entropy
        else:
            logits = hidden @ weight.T + bias
            logits = logits if exists is None else logits.masked_fill(~exists, -torch.inf)
            choice = estimator.choose(logits, generator=generator)
            law, _ = estimator.law(logits)
            log_p = torch.log_softmax(law, -1)
            log_prob = log_p.gather(-1, choice.index.unsqueeze(-1)).squeeze(-1)
            entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
        uses = (choice.select(table).square().sum(-1), choice.gate(), log_prob, entropy)
        upstream = normal(*ROWS, seed=5, dtype=torch.float32).to(DEVICE)
        found = [
            torch.autograd.grad(use, leaves, upstream, retain_graph=True, materialize_grads=True)
            for use in uses
        ]
        results.append([choice.index, *uses, *(gradient for gradients in found for gradient in gradients)])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)


def test_memory_beyond_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than `MEMORY`, with a table of its own and with the weight as table, in half precision.

    As on a GPU, the gradient of the weight is added up in its own dtype. The kernels are replaced, since the
    interpreter holds the arguments of the last launch: they allocate a few numbers per row.
    """
    rows, width = 512, 128
    monkeypatch.setattr(launch, "stream", lambda logits, key, fused, to, **how: to.indices.fill_(1))
    monkeypatch.setattr(launch, "backward", lambda logits, *_, out, **how: out)
    monkeypatch.setattr(launch, "pull_log_prob", lambda logits, *_: None)
    monkeypatch.setattr(sizes, "_sum_dtype", lambda weight: weight.dtype)
    # Sizes in the proportions of 8,192 rows of 128,256 categories and 4,096 features.
    monkeypatch.setattr(sizes, "MEMORY", 64 * 2 * CATEGORIES)
    monkeypatch.setattr(sizes, "MARGIN", 32 * rows)
    monkeypatch.setattr(sizes, "SUM_BYTES", 8 * 2 * CATEGORIES)
    monkeypatch.setattr(sizes, "TILE", 1)
    estimator = gapped.GST(gap="auto", backend="triton")
    mask = torch.arange(CATEGORIES, device=DEVICE) > 3
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "requires_grad": True}
    hidden = torch.ones(rows, width, **half)
    weight, table = (torch.ones(CATEGORIES, width, **half) for _ in range(2))
    upstream = torch.ones(rows, width, dtype=torch.bfloat16, device=DEVICE)

    def beyond(own: Tensor | str) -> int:
        leaves = [hidden, weight, *([table] if own is table else [])]
        is_number = isinstance(own, str)

        def call() -> object:
            choice = estimator.choose_linear(hidden, weight, mask=mask)
            result = getattr(choice, own) if isinstance(own, str) else choice.select(own)
            return torch.autograd.grad(result, leaves, upstream[:, 0].float() if is_number else upstream)

        return peak_of(call, hidden, weight, table, upstream, mask) - bytes_of(*leaves)

    # All logits take eight times as much.
    assert 2 * rows * CATEGORIES == 8 * sizes.MEMORY
    for own in (table, weight, "log_prob"):
        assert sizes.MEMORY / 2 < beyond(own) <= sizes.MEMORY
    # By torch, in parts of four rows in float32: about four of them at a time.
    for name in ("CHUNK_BYTES", "GPU_CHUNK_BYTES"):
        monkeypatch.setattr(sizes, name, 4 * 4 * CATEGORIES)
    monkeypatch.setattr(sizes, "FEWEST_ROWS", 1)
    assert beyond("entropy") <= beyond("log_prob") + 4.5 * sizes.CHUNK_BYTES


@pytest.mark.usefixtures("small_spans")
@pytest.mark.parametrize("name", ["gapmax", "decoupled"])
def test_given_categories_have_the_law_of_drawn_ones(name: str) -> None:
    """The kernel that draws writes the sums of a law whose categories are given."""
    leaves = head()
    estimator = replace(ESTIMATORS[name], backend="triton")
    index = torch.arange(6, device=DEVICE).view(ROWS) * 700
    index[0, 1] = CATEGORIES
    mask = torch.arange(CATEGORIES, device=DEVICE) != 700 * 3
    choice = gapped.linear_choice(*leaves[:3], estimator=estimator, index=index, mask=mask)
    logits = (leaves[0] @ leaves[1].T + leaves[2]).masked_fill(~mask, -torch.inf)
    law = torch.log_softmax(estimator.law(logits)[0], -1)
    expected = torch.cat([law, law.new_zeros(*ROWS, 1)], -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(choice.log_prob, expected, rtol=2e-4, atol=2e-5)
    upstream = normal(*ROWS, seed=5, dtype=torch.float32).to(DEVICE)
    upstream[1, 0] = 0.0  # of the forbidden category, whose log-probability is -inf
    ours, theirs = (torch.autograd.grad(each, leaves[:3], upstream) for each in (choice.log_prob, expected))
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


SOFT = [name for name, estimator in ESTIMATORS.items() if estimator.has_surrogate]


@pytest.mark.slow_if(
    lambda name, categories: categories > 7 and name not in ("gst", "gst-auto", "gumbel-softmax")
)
@pytest.mark.parametrize(
    ("name", "categories"), [*((n, 7) for n in SOFT), *((n, 4100) for n in LONG if n in SOFT)]
)
def test_a_mixture_is_the_product_with_soft_samples(
    name: str, categories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rows in blocks of four, four and two, each with a seed; every third category is masked."""
    monkeypatch.setattr("gapped.vocabulary.mix.rows_of_a_chunk", lambda *_: 4)
    # The interpreter takes as long for each draw as for a sample.
    options = {"samples": 2} if name == "gumbel-rao" else {}
    estimator = replace(ESTIMATORS[name], backend="triton", **options)
    mask, results = torch.arange(categories, device=DEVICE) % 3 > 0, []
    for is_mixed in (True, False):
        logits, table = (
            normal(*s, seed=len(s), dtype=torch.float32).to(DEVICE).requires_grad_()
            for s in ((2, 5, categories), (categories, 3))
        )
        generator = torch.Generator(DEVICE).manual_seed(1)
        if is_mixed:
            value = estimator.mix(logits, table, mask=mask, generator=generator)
            assert gapped.backend_used() == "triton"
        else:
            seeds = torch.randint(2**62, (3,), device=DEVICE, generator=generator).tolist()
            blocks = logits.masked_fill(~mask, -torch.inf).view(10, categories).split(4)
            samples = [
                replace(estimator, hard=False).sample(
                    block, generator=torch.Generator(DEVICE).manual_seed(seed)
                )
                for block, seed in zip(blocks, seeds, strict=True)
            ]
            value = torch.cat(samples).view(logits.shape) @ table
        weight = normal(2, 5, 3, seed=5, dtype=torch.float32).to(DEVICE)
        results.append([value, *torch.autograd.grad(value, (logits, table), weight)])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)


class _Recurrent(torch.nn.Module):
    """A language model whose cache is the sum of what it has read."""

    def __init__(self, weight: Tensor, bias: Tensor, table: Tensor) -> None:
        super().__init__()
        self.head, self.embedding = torch.nn.Linear(1, 1), torch.nn.Embedding(1, 1)
        del self.head.weight, self.head.bias, self.embedding.weight
        self.head.weight, self.head.bias, self.embedding.weight = weight, bias, table
        self.get_input_embeddings, self.get_output_embeddings = lambda: self.embedding, lambda: self.head

    def forward(self, inputs_embeds: Tensor, past_key_values: Tensor | None, use_cache: bool) -> Any:
        total = inputs_embeds.cumsum(1) + (0 if past_key_values is None else past_key_values)
        return SimpleNamespace(last_hidden_state=total.tanh(), past_key_values=total[:, -1:])


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", ["gapmax", "gumbel-softmax"])
def test_a_rollout_has_the_gradients_of_its_steps(name: str, feedback: bool) -> None:
    """Each step has a key, and head and table have their gradients from a span of all steps."""
    results = []
    for is_rollout in (True, False):
        prompts, weight, bias, table = leaves = head()
        model = _Recurrent(weight, bias, table)
        generator = torch.Generator(DEVICE).manual_seed(1)
        # At a low temperature a score of other noise than the step's would have no finite exponential.
        levels = {"tau": 0.05} if name == "gumbel-softmax" else {}
        estimator = replace(ESTIMATORS[name], backend="triton", **levels)
        if is_rollout:
            how: dict[str, Any] = {"estimator": estimator, "feedback": feedback, "generator": generator}
            texts = gapped.rollout(model, prompts, 4, **how)
            rows, scores = texts.embeddings, texts.log_prob - texts.entropy
        else:
            embeds, cache, steps, scored = prompts, None, [], []
            for _ in range(4):
                out = model(embeds, cache, True)
                cache = out.past_key_values
                choice = estimator.choose_linear(
                    out.last_hidden_state[:, -1], weight, bias, generator=generator
                )
                steps.append(choice.select(table))
                scored.append(choice.log_prob - choice.entropy)
                embeds = (steps[-1] if feedback else table[choice.index]).unsqueeze(1)
            rows, scores = torch.stack(steps, 1), torch.stack(scored, 1)
        cost = rows.square().sum() + scores.square().sum()
        results.append([rows, scores, *torch.autograd.grad(cost, leaves)])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)


class _Names(TorchDispatchMode):
    """Names of the operators that run, but for those that only make room or views."""

    FREE = ("view", "empty", "expand", "detach", "slice", "transpose", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in func.name() for word in self.FREE):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("categories", [7, CATEGORIES])
def test_decoding_is_a_key_a_product_and_a_draw(categories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else that a device would have to launch takes as long as the draw of a few rows."""
    hidden, weight, *_ = head()
    estimator = gapped.GST(gap="auto", backend="triton")
    with torch.no_grad(), _Names() as seen:
        for drawing in ("stream", "forward"):
            monkeypatch.setattr(launch, drawing, lambda *_, **how: seen.names.append("draw"))
        estimator.choose_linear(hidden, weight[:categories])
    assert seen.names == ["aten::randint.generator", "aten::mm.out", "draw"]


@pytest.mark.parametrize("masked", [False, True])
def test_short_rows_have_a_log_probability_where_no_gradient_is_wanted(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed when it is asked for, in as many chunks; a row may have no category."""
    monkeypatch.setattr("gapped.vocabulary.rows_of_a_chunk", lambda *_: 4)
    hidden, weight, bias, _ = head()
    mask = torch.arange(7, device=DEVICE) % 3 > 0
    mask = mask.expand(*ROWS, 7) & (torch.arange(ROWS[1], device=DEVICE) > 0).unsqueeze(-1)
    found = []
    for wanted in (True, False):
        generator = torch.Generator(DEVICE).manual_seed(1)
        with torch.set_grad_enabled(wanted):
            choice = gapped.GST(tau=0.5, backend="triton").choose_linear(
                hidden, weight[:7], bias[:7], mask=mask if masked else None, generator=generator
            )
        assert (choice._draws.law is None) is not wanted
        log_prob = choice.log_prob
        assert log_prob.requires_grad is wanted
        found.append((choice.index, log_prob))
    assert_equal(*found)
    assert bool((found[0][0] == 7).any()) is masked
