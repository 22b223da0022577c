"""ListOps as a fleet's task: a plain training loop as its twin, batches, the model, resuming, records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, seeded
from reference_tree import reference_tree
from torch import Tensor, nn
from toy_tasks import (
    CPU,
    DOUBLE,
    LISTOPS_TINY,
    equal,
    listops_task,
    resumed_twins,
    toy_expressions,
    toy_split,
    train,
    tree_inputs,
)

import gapped
from gapped import simplex
from gapped.comparison import records
from gapped.errors import GappedError
from gapped_lab import task_kinds
from gapped_lab.engines.local import Local
from gapped_lab.fleet import Run, Trainer, derived_seed
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.listops import LISTOPS_PROTOCOLS, ListOpsProtocol
from gapped_lab.listops import task as task_module
from gapped_lab.listops.examples import CHARACTERS, Split
from gapped_lab.listops.model import TreeClassifier, drop
from gapped_lab.listops.source import ListOps
from gapped_lab.listops.tables import Greedy, Sampler
from gapped_lab.listops.task import ListOpsTask
from gapped_lab.listops.tree import latent_tree
from gapped_lab.listops.variants import LateMaskGumbelSoftmax
from gapped_lab.recipe import recipe_from
from gapped_lab.records import Images, Trees
from gapped_lab.store import Store
from gapped_lab.training import Settings

# A plain twin


class PlainModel(nn.Module):
    """The model out of torch's own modules, with the tree by its definition."""

    def __init__(self, twin: TreeClassifier, run: int) -> None:
        super().__init__()
        d = twin.width
        self.rate = twin.dropout
        with torch.random.fork_rng(devices=[]):
            self.embedding = nn.Embedding(twin.embedding.shape[1], d)
            self.leaf = nn.LSTM(d, d, batch_first=True)
            self.cell = nn.Linear(2 * d, 5 * d)
            self.hidden, self.output = nn.Linear(d, d), nn.Linear(d, 10)
        self.query = nn.Parameter(twin.query[run].detach().clone())
        self.double()
        for mine, theirs in {
            self.embedding.weight: twin.embedding[run],
            self.leaf.weight_ih_l0: twin.input_weight[run].t(),
            self.leaf.weight_hh_l0: twin.recurrent_weight[run].t(),
            self.leaf.bias_ih_l0: twin.input_bias[run, 0],
            self.leaf.bias_hh_l0: twin.recurrent_bias[run, 0],
            self.cell.weight: twin.tree_weight[run].t(),
            self.cell.bias: twin.tree_bias[run, 0],
            self.hidden.weight: twin.hidden.weight[run].t(),
            self.hidden.bias: twin.hidden.bias[run, 0],
            self.output.weight: twin.output.weight[run].t(),
            self.output.bias: twin.output.bias[run, 0],
        }.items():
            mine.data.copy_(theirs.detach())

    def forward(self, tokens: Tensor, lengths: Tensor, sampler: Sampler, noise: Any, rate: float) -> Tensor:
        words = self.embedding(tokens)
        words = drop(words.view(1, -1, words.shape[-1]), rate, noise).view(words.shape)
        h, c, states = None, None, []
        for step in range(tokens.shape[1]):
            before = None if h is None else (h, c)
            _, (h, c) = self.leaf(words[:, step : step + 1], before)
            states.append(torch.cat([h[0], c[0]], -1))
        leaves = torch.stack(states, 1).unsqueeze(0)
        cell = (self.cell.weight.t().unsqueeze(0), self.cell.bias.view(1, 1, -1), self.query.unsqueeze(0))
        root = reference_tree(leaves, *cell, lengths.unsqueeze(0), sampler, noise)
        hidden = drop(self.hidden(drop(root, rate, noise)).relu(), rate, noise)
        return self.output(hidden)[0]


def plain_loop(task: ListOpsTask, model: PlainModel, sampler: Sampler, seed: int) -> dict[str, list[float]]:
    """Train as a script would: Adam, clip_grad_norm_, ReduceLROnPlateau, the best weights kept."""
    rules, data = task.protocol, toy_expressions()
    optimiser = torch.optim.Adam(model.parameters(), lr=rules.learning_rate)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, mode="max", factor=0.5, patience=rules.patience
    )
    history: dict[str, list[float]] = {"loss": [], "valid": [], "rate": [], "norm": [], "query": []}
    best, best_state = -1.0, dict(model.state_dict())
    for epoch in range(rules.epochs):
        task.start_epoch(epoch)
        noise = seeded(derived_seed(seed, "train", epoch))
        losses = []
        for step in range(task.steps):
            task.load_batch(step)
            bucket, rows = task.buckets[task.program(step)[0]], task.batch[0]
            optimiser.zero_grad()
            logits = model(bucket.tokens[rows], bucket.lengths[rows], sampler, noise, rules.dropout)
            loss = F.cross_entropy(logits, bucket.labels[rows])
            loss.backward()
            history["query"].append(float(torch.linalg.vector_norm(model.query.grad)))
            history["norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), rules.clip)))
            optimiser.step()
            losses.append(loss.item())
            if step + 1 in (math.ceil(task.steps / 2), task.steps):
                score = plain_accuracy(model, data.valid)
                history["valid"].append(score)
                plateau.step(score)
                history["rate"].append(optimiser.param_groups[0]["lr"])
                if score > best:
                    best, best_state = score, {k: v.clone() for k, v in model.state_dict().items()}
        history["loss"].append(sum(losses) / len(losses))
    model.load_state_dict(best_state)
    return {**history, "test": [plain_accuracy(model, data.test)]}


def plain_accuracy(model: PlainModel, split: Split) -> float:
    with torch.no_grad():
        logits = model(split.tokens.long(), split.lengths, Greedy(), None, 0.0)
    return float((logits.argmax(-1) == split.labels).double().mean())


def test_a_fleet_of_one_is_a_plain_training_loop() -> None:
    estimator = gapped.GST(tau=0.7)
    task = listops_task()
    model = PlainModel(task.model, 0)
    expected = plain_loop(listops_task(), model, estimator, seed=11)
    trainer = Trainer(task, [Run(estimator, LISTOPS_TINY.learning_rate)], LISTOPS_TINY.epochs, 11, CPU)
    rates = []
    for _ in range(LISTOPS_TINY.epochs):
        trainer.train_epoch()
        rates.append(trainer.adam.learning_rate.item())
    losses = [row[0] for row in trainer.history["train_cross_entropy"]]
    assert losses == pytest.approx(expected["loss"], abs=1e-9)
    assert [row[0] for row in trainer.history["valid_accuracy"]] == expected["valid"][1::2]
    assert rates == pytest.approx(expected["rate"][1::2], rel=1e-12)
    norms = torch.tensor(expected["query"]).view(LISTOPS_TINY.epochs, -1)
    assert [row[0] for row in trainer.history["query_gradient_norm"]] == pytest.approx(norms.mean(1).tolist())
    assert trainer.history["query_gradient_zero"] == [[0.0]] * LISTOPS_TINY.epochs
    metrics = trainer.test()
    assert metrics["test_accuracy"] == pytest.approx(expected["test"], abs=1e-12)
    assert metrics["best_valid_accuracy"] == [max(expected["valid"])]
    # The twin has met everything that it is there to check.
    assert expected["rate"][-1] < LISTOPS_TINY.learning_rate / 3
    assert min(expected["norm"]) < LISTOPS_TINY.clip < max(expected["norm"])
    assert expected["valid"].index(max(expected["valid"])) < len(expected["valid"]) - 1


def test_batches_share_lengths_and_have_their_own_examples() -> None:
    task = listops_task(seeds=(3, 8, 3))
    task.start_epoch(0)
    by_bucket: dict[int, list[Tensor]] = {}
    for step in range(task.steps):
        task.load_batch(step)
        by_bucket.setdefault(task.program(step)[0], []).append(task.batch.clone())
    assert sum(map(len, by_bucket.values())) == task.steps
    differ = False
    for bucket, batches in by_bucket.items():
        rows = torch.cat(batches, 1)
        size = len(task.buckets[bucket].labels)
        assert rows.shape[1] == size // LISTOPS_TINY.batch * LISTOPS_TINY.batch
        assert all(len(set(row.tolist())) == rows.shape[1] for row in rows)
        assert torch.equal(rows[0], rows[2])
        differ = differ or not torch.equal(rows[0], rows[1])
    assert differ
    first = [task.program(step) for step in range(task.steps)]
    task.start_epoch(1)
    assert first != [task.program(step) for step in range(task.steps)]
    assert sorted(first) == sorted(task.program(step) for step in range(task.steps))


def test_parses_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = listops_task(seeds=(3, 8))
    sampler = Grouped.of([gapped.GST()] * 2, 1, CPU, DOUBLE)
    together = task.parse(task.test, sampler)
    assert (together.merges >= 0).sum(-1).tolist() == [(task.test.lengths - 1).tolist()] * 2
    for tokens in (1, 40):
        monkeypatch.setattr(task_module, "_CHUNK", tokens)
        sizes = [(len(rows), longest) for rows, longest in task_module._chunks(task.test.lengths, CPU)]
        assert sum(size for size, _ in sizes) == len(task.test)
        assert all(size == 1 or size * longest <= tokens for size, longest in sizes)
        apart = task.parse(task.test, sampler)
        assert equal(together, apart)


def test_too_few_expressions_are_refused() -> None:
    data = toy_expressions()
    few = ListOps("toy", toy_split(3, 0), data.valid, data.test, 0, 14)
    with pytest.raises(GappedError, match=r"^count: got 3, expected enough"):
        ListOpsTask(LISTOPS_TINY, few, [0], CPU)


def test_models_start_as_published() -> None:
    d = 60
    model = TreeClassifier(ListOpsProtocol("wide", width=d), [seeded(0), seeded(1)])
    assert model.embedding.std().item() == pytest.approx(0.01, rel=0.1)
    assert model.query.std().item() == pytest.approx(0.01, rel=0.3)
    assert model.input_weight.std().item() == pytest.approx((2 / d) ** 0.5, rel=0.05)
    assert model.hidden.weight.std().item() == pytest.approx((2 / d) ** 0.5, rel=0.05)
    assert 0.0018 < model.output.weight.abs().max().item() <= 0.002
    eye = torch.eye(d)
    for run in range(2):
        assert_close(model.recurrent_weight[run] @ model.recurrent_weight[run].t(), eye, 1e-5)
        assert_close(model.tree_weight[run] @ model.tree_weight[run].t(), torch.eye(2 * d), 1e-5)
    bias = model.input_bias[0, 0]
    assert (bias[d : 2 * d] == 1).all()
    assert bias.sum().item() == d
    assert not any(each.any() for each in (model.recurrent_bias, model.tree_bias, model.hidden.bias))
    assert not torch.equal(model.tree_weight[0], model.tree_weight[1])


def toy_trainer() -> Trainer:
    runs = [Run(gapped.GST(), 0.02), Run(gapped.GumbelSoftmax(tau=0.5), 0.02)]
    return Trainer(listops_task(seeds=(1, 2), dtype=torch.float32), runs, 3, 5, CPU)


def test_resuming_changes_no_bit() -> None:
    whole, second = resumed_twins(toy_trainer, 1)
    assert second.history == whole.history
    assert second.test() == whole.test()
    assert equal(whole.parameters, second.parameters)
    assert whole.selection is not None
    assert second.selection is not None
    assert whole.selection.state_dict().keys() == {"last", "best", "mark", "bad", "factor", "weights"}
    assert torch.equal(whole.selection.bad, second.selection.bad)
    assert torch.equal(whole.adam.learning_rate, second.adam.learning_rate)


TABLE: dict[str, Any] = {
    "name": "trees",
    "task": "listops",
    "protocol": "tiny",
    "seeds": 2,
    "epochs": 1,
    "tau": [1.0, 0.1],
    "cell": [{"estimator": "gst", "label": "GST"}, {"estimator": "gumbel-softmax", "label": "STGS"}],
}


@pytest.fixture
def toy_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        def __init__(self, count: int, max_tokens: int) -> None:
            rules = LISTOPS_PROTOCOLS["tiny"]
            assert (count, max_tokens) == (rules.count, rules.max_tokens)

        def load(self, *_: object, **__: object) -> ListOps:
            return toy_expressions()

    monkeypatch.setattr(task_kinds, "ListOpsSource", Source)


@pytest.mark.usefixtures("toy_source")
def test_a_recipe_leaves_records_curves_and_trees(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.warns(UserWarning, match="no official validation or test file"):
        lines = Local("cpu").run([recipe_from(TABLE, "test")], store, Settings())
    assert len(lines) == 8
    for line in lines:
        metrics = line.metrics
        assert line.data == "listops (generated)"
        assert line.status == "ok"
        assert 0 <= metrics["test_accuracy"] <= 1
        assert 0 <= metrics["test_tree_f1"] <= 1
        assert 0 < metrics["left_branching_f1"] < 1
        assert {"test_accuracy_length_1_to_9", "test_accuracy_depth_1"} <= metrics.keys()
        assert metrics["best_valid_accuracy"] >= metrics["valid_accuracy"]
        assert line.fleet_gpu_memory_gb is None
    trees = records.read(tmp_path, Trees)
    assert len(trees) == 4
    for example in trees[0].examples:
        words = example.tokens
        assert len(example.found) == len(example.true) == len(words) - 1
        assert example.found[-1] == [0, len(words)]
    assert not records.read(tmp_path, Images)
    assert records.read(tmp_path, records.Curve)[0].series.keys() >= {"train_cross_entropy", "valid_accuracy"}


THETA = torch.tensor([0.2, -0.1, 0.4, 0.3, 0.0], dtype=DOUBLE)
WEIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0, 7.0], dtype=DOUBLE)
MASK = torch.tensor([True, True, True, False, False])


def by_formula(noise: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """y and the gradient of WEIGHT . y in the allowed scores, category by category."""
    weights = [float(torch.exp((t + g) / tau)) for t, g in zip(THETA, noise, strict=True)]
    p = [w / sum(weights) for w in weights]
    kept = [(p[j] if MASK[j] else 0.0) + 1e-20 for j in range(5)]
    total = sum(kept)
    y = [k / total for k in kept]
    mean = sum(float(WEIGHT[j]) * y[j] for j in range(5))
    gradient = [0.0] * 5
    for j in range(3):
        for k in range(3):
            slope = p[j] * ((j == k) - p[k]) / tau
            gradient[k] += slope * (float(WEIGHT[j]) - mean) / total
    return torch.tensor(y, dtype=DOUBLE), torch.tensor(gradient, dtype=DOUBLE)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("seed", range(6))
def test_the_formula_on_the_same_noise(tau: float, seed: int) -> None:
    theta = THETA.clone().requires_grad_()
    sample = LateMaskGumbelSoftmax(tau).sample(theta, mask=MASK, generator=seeded(seed))
    y, expected = by_formula(simplex.gumbel(THETA, seeded(seed)), tau)
    assert sample.detach().tolist() == [float(j == int(y.argmax())) for j in range(5)]
    (gradient,) = torch.autograd.grad(sample @ WEIGHT, theta)
    assert_close(gradient, expected, 1e-10)


def test_a_sampler_that_masks_late_is_shown_the_padding() -> None:
    """As far as the run's own batch goes: that of the second run ends at six."""

    class Looking(Greedy):
        masks_late = True

        def sample(self, logits: Tensor, **how: object) -> Tensor:
            seen.append(logits.detach().clone())
            return super().sample(logits, **how)  # type: ignore[arg-type]

    seen: list[Tensor] = []
    lengths = torch.tensor([[9, 1, 4, 2], [3, 5, 2, 6]])
    latent_tree(*tree_inputs(2, 4, 9, 5), lengths, Looking())
    for layer, scores in enumerate(seen):
        ends = torch.arange(8 - layer) < lengths.amax(1).view(-1, 1, 1) - 1 - layer
        assert torch.equal(scores.isfinite(), ends.expand_as(scores))


def test_a_task_of_characters_trains_in_batches_of_all_lengths() -> None:
    protocol = replace(LISTOPS_TINY, characters=True, waste=1.0)
    task = ListOpsTask(protocol, toy_expressions(), [0, 1], CPU)
    (bucket,) = task.buckets
    assert len(bucket.labels) == len(toy_expressions().train)
    assert task.model.embedding.shape[1] == len(CHARACTERS)
    runs = [Run(LateMaskGumbelSoftmax(0.1), 0.02), Run(gapped.GST(), 0.02)]
    trainer = Trainer(task, runs, 1, 3, CPU)
    train(trainer)
    metrics = trainer.test()
    assert "test_tree_f1" not in metrics
    assert not any("length" in name for name in metrics)
    assert {"test_accuracy", "test_accuracy_depth_1"} <= metrics.keys()
    assert list(trainer.show([0, 1])) == []
    assert trainer.history["query_gradient_norm"][0][0] > 0


def test_a_batch_of_all_lengths_is_padded_to_its_own_longest_and_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_module, "_WIDTHS", 4)
    protocol = replace(LISTOPS_TINY, characters=True, waste=1.0)
    task = ListOpsTask(protocol, toy_expressions(), [0, 1], CPU)
    (bucket,) = task.buckets
    task.start_epoch(0)
    widths = []
    for step in range(task.steps):
        task.load_batch(step)
        number, width = task.program(step)
        longest = int(bucket.lengths[task.batch].max())
        assert number == 0
        assert longest <= width <= min(longest + 3, bucket.tokens.shape[1])
        widths.append(width)
    assert len(set(widths)) > 1
