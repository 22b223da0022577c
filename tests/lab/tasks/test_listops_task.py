"""ListOps as a fleet's task: a plain training loop as its twin, batches, brackets, validation, resuming."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, seeded
from listops_text import decode, encode
from torch import Tensor, nn

import gapped
from gapped.errors import GappedError
from gapped.lab import records, task_kinds
from gapped.lab.data.listops import ListOps
from gapped.lab.data.listops.examples import Split, stack
from gapped.lab.data.listops.generator import generate
from gapped.lab.data.listops.language import parse
from gapped.lab.engines.local import Local
from gapped.lab.fleet.clip import clip_scales, scaled
from gapped.lab.fleet.selection import Selection, SelectionRule
from gapped.lab.fleet.trainer import Run, Trainer, derived_seed
from gapped.lab.recipe import find_recipe, recipe_from
from gapped.lab.spec import RunSpec
from gapped.lab.store import Store
from gapped.lab.tasks.listops import task as listops_task
from gapped.lab.tasks.listops.brackets import agreement, left_branching, merged_spans
from gapped.lab.tasks.listops.model import TreeClassifier, drop
from gapped.lab.tasks.listops.protocol import PROTOCOLS, Protocol, protocol
from gapped.lab.tasks.listops.reference import reference_tree
from gapped.lab.tasks.listops.sampler import Greedy, Sampler
from gapped.lab.tasks.listops.task import ListOpsTask, depths
from gapped.lab.training import Settings

CPU, DOUBLE = torch.device("cpu"), torch.float64
TINY = Protocol(
    "tiny-test", width=5, dropout=0.2, batch=6, learning_rate=0.02, epochs=3, clip=0.5, patience=0, waste=0.3
)


def toy_split(count: int, seed: int, least: int = 1) -> Split:
    expressions = [parse(text) for _, text in generate(4 * count, seed, progress=False)]
    short = [each for each in expressions if least <= len(each.tokens) < 14][:count]
    return stack(short, False, count)


TOY = toy_split(30, 0, least=2), toy_split(25, 1), toy_split(30, 2)


def toy_data() -> ListOps:
    return ListOps("toy", *TOY, 0, 14)


def toy_task(rules: Protocol = TINY, seeds: Sequence[int] = (3,), dtype: torch.dtype = DOUBLE) -> ListOpsTask:
    task = ListOpsTask(rules, toy_data(), seeds, CPU, dtype=dtype)
    # Large enough that a few steps make a difference.
    for weight in (task.model.embedding, task.model.output.weight, task.model.query):
        weight.data *= 100
    return task


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
    rules, data = task.protocol, toy_data()
    optimiser = torch.optim.Adam(model.parameters(), lr=rules.learning_rate)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, mode="max", factor=0.5, patience=rules.patience
    )
    found: dict[str, list[float]] = {"loss": [], "valid": [], "rate": [], "norm": []}
    best, kept = -1.0, dict(model.state_dict())
    for epoch in range(rules.epochs):
        task.start_epoch(epoch)
        noise = seeded(derived_seed(seed, "train", epoch))
        losses = []
        for step in range(task.steps):
            task.load_batch(step)
            bucket, rows = task.buckets[task.program(step)], task.batch[0]
            optimiser.zero_grad()
            logits = model(bucket.tokens[rows], bucket.lengths[rows], sampler, noise, rules.dropout)
            loss = F.cross_entropy(logits, bucket.labels[rows])
            loss.backward()
            found["norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), rules.clip)))
            optimiser.step()
            losses.append(loss.item())
            if step + 1 in (math.ceil(task.steps / 2), task.steps):
                score = plain_accuracy(model, data.valid)
                found["valid"].append(score)
                plateau.step(score)
                found["rate"].append(optimiser.param_groups[0]["lr"])
                if score > best:
                    best, kept = score, {k: v.clone() for k, v in model.state_dict().items()}
        found["loss"].append(sum(losses) / len(losses))
    model.load_state_dict(kept)
    return {**found, "test": [plain_accuracy(model, data.test)]}


def plain_accuracy(model: PlainModel, split: Split) -> float:
    with torch.no_grad():
        logits = model(split.tokens.long(), split.lengths, Greedy(), None, 0.0)
    return float((logits.argmax(-1) == split.labels).double().mean())


def test_a_fleet_of_one_is_a_plain_training_loop() -> None:
    estimator = gapped.GST(tau=0.7)
    task = toy_task()
    model = PlainModel(task.model, 0)
    expected = plain_loop(toy_task(), model, estimator, seed=11)
    trainer = Trainer(task, [Run(estimator, TINY.learning_rate)], TINY.epochs, 11, CPU)
    rates = []
    for _ in range(TINY.epochs):
        trainer.train_epoch()
        rates.append(trainer.adam.learning_rate.item())
    losses = [row[0] for row in trainer.history["train_cross_entropy"]]
    assert losses == pytest.approx(expected["loss"], abs=1e-9)
    assert [row[0] for row in trainer.history["valid_accuracy"]] == expected["valid"][1::2]
    assert rates == pytest.approx(expected["rate"][1::2], rel=1e-12)
    tested = trainer.test()
    assert tested["test_accuracy"] == pytest.approx(expected["test"], abs=1e-12)
    assert tested["best_valid_accuracy"] == [max(expected["valid"])]
    # The twin has met everything that it is there to check.
    assert expected["rate"][-1] < TINY.learning_rate / 3
    assert min(expected["norm"]) < TINY.clip < max(expected["norm"])
    assert expected["valid"].index(max(expected["valid"])) < len(expected["valid"]) - 1


# Validation, clipping


def test_plateaus_are_torchs_run_by_run() -> None:
    runs, patience = 5, 2
    scores = torch.rand(40, runs, dtype=DOUBLE, generator=seeded(4)).cummax(0).values * 0.9
    scores += 0.05 * torch.rand(40, runs, dtype=DOUBLE, generator=seeded(5))
    weight = torch.zeros(runs, 2, dtype=DOUBLE)
    selection = Selection(SelectionRule("score", lambda: scores[0], 1, patience), [weight])
    optimisers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(runs)]
    plateaus = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, mode="max", factor=0.5, patience=patience)
        for each in optimisers
    ]
    for number, row in enumerate(scores):
        weight.fill_(number)
        selection.observe(row)
        for each, score in zip(plateaus, row.tolist(), strict=True):
            each.step(score)
        assert selection.factor.tolist() == [each.param_groups[0]["lr"] for each in optimisers]
    assert len(set(selection.factor.tolist())) > 1
    # The weights of the first of the highest scores.
    assert selection.weights[0][:, 0].tolist() == scores.argmax(0).tolist()
    with selection.best_weights():
        assert weight[:, 1].tolist() == scores.argmax(0).tolist()
    assert (weight == 39).all()


def test_a_broken_run_keeps_its_best_weights() -> None:
    weight = torch.ones(2, 3)
    selection = Selection(SelectionRule("score", lambda: weight[:, 0], 1, 4), [weight])
    selection.observe(torch.tensor([0.5, 0.5]))
    weight[0] = torch.nan
    weight[1] = 2
    selection.observe(torch.tensor([torch.nan, 0.6]))
    assert selection.weights[0][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(("steps", "often"), [(10, 2), (7, 2), (5, 1), (9, 3), (1, 1)])
def test_validations_are_evenly_spaced(steps: int, often: int) -> None:
    rule = SelectionRule("score", torch.empty, often, 0)
    due = [step + 1 for step in range(steps) if rule.due(step, steps)]
    assert len(due) == often
    assert due[-1] == steps
    assert due == [-(-steps * i // often) for i in range(1, often + 1)]


def test_norms_are_clipped_run_by_run_as_torch_does() -> None:
    sizes = torch.tensor([0.01, 1.0, 100.0], dtype=DOUBLE)
    gradients = [
        torch.randn(3, *shape, dtype=DOUBLE, generator=seeded(i)) * sizes.view(-1, *(1,) * len(shape))
        for i, shape in enumerate([(4, 3), (1, 3), (2,)])
    ]
    plain = []
    for run in range(3):
        own = [nn.Parameter(torch.zeros_like(g[run])) for g in gradients]
        for p, g in zip(own, gradients, strict=True):
            p.grad = g[run].clone()
        nn.utils.clip_grad_norm_(own, 5.0)
        plain.append([p.grad for p in own])
    scales = clip_scales(gradients, 5.0)
    for run in range(3):
        for mine, theirs in zip(gradients, plain[run], strict=True):
            assert_close(scaled(mine, scales)[run], theirs, 1e-14)


# Batches


def test_batches_share_lengths_and_have_their_own_examples() -> None:
    task = toy_task(seeds=(3, 8, 3))
    task.start_epoch(0)
    seen: dict[int, list[Tensor]] = {}
    for step in range(task.steps):
        task.load_batch(step)
        seen.setdefault(task.program(step), []).append(task.batch.clone())
    assert sum(map(len, seen.values())) == task.steps
    differ = False
    for bucket, batches in seen.items():
        rows = torch.cat(batches, 1)
        size = len(task.buckets[bucket].labels)
        assert rows.shape[1] == size // TINY.batch * TINY.batch
        assert all(len(set(row.tolist())) == rows.shape[1] for row in rows)
        assert torch.equal(rows[0], rows[2])
        differ = differ or not torch.equal(rows[0], rows[1])
    assert differ
    first = [task.program(step) for step in range(task.steps)]
    task.start_epoch(1)
    assert first != [task.program(step) for step in range(task.steps)]
    assert sorted(first) == sorted(task.program(step) for step in range(task.steps))


def test_every_expression_is_in_one_bucket_with_little_padding() -> None:
    task = toy_task()
    tokens = sum(int(bucket.lengths.sum()) for bucket in task.buckets)
    cells = sum(bucket.tokens.numel() for bucket in task.buckets)
    assert 1 - tokens / cells <= TINY.waste
    whole = {decode(row.tolist()) for bucket in task.buckets for row in bucket.tokens}
    assert whole <= {decode(row.tolist()) for row in toy_data().train.tokens}


def test_parses_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = toy_task(seeds=(3, 8))
    together = task.parse(task.test)
    assert (together.merges >= 0).sum(-1).tolist() == [(task.test.lengths - 1).tolist()] * 2
    for tokens in (1, 40):
        monkeypatch.setattr(listops_task, "_CHUNK", tokens)
        sizes = [(len(rows), longest) for rows, longest in listops_task._chunks(task.test.lengths, CPU)]
        assert sum(size for size, _ in sizes) == len(task.test)
        assert all(size == 1 or size * longest <= tokens for size, longest in sizes)
        apart = task.parse(task.test)
        for one, other in zip(together, apart, strict=True):
            assert torch.equal(one, other)


def test_too_few_expressions_are_refused() -> None:
    data = toy_data()
    few = ListOps("toy", toy_split(3, 0), data.valid, data.test, 0, 14)
    with pytest.raises(GappedError, match=r"^count: got 3, expected enough"):
        ListOpsTask(TINY, few, [0], CPU)


# Brackets


def slow_spans(merges: Sequence[int], length: int) -> list[tuple[int, int]]:
    nodes = [(i, i + 1) for i in range(length)]
    made = []
    for at in merges:
        if at >= 0:
            nodes[at : at + 2] = [(nodes[at][0], nodes[at + 1][1])]
            made.append(nodes[at])
    return made


def test_merges_become_spans() -> None:
    g = seeded(0)
    for length in range(1, 9):
        chosen = [int(torch.randint(length - 1 - step, (1,), generator=g)) for step in range(length - 1)]
        padded = torch.tensor([chosen + [-1] * (10 - length)])
        expected = slow_spans(chosen, length)
        found = merged_spans(padded)[0].tolist()
        assert found[: length - 1] == [list(span) for span in expected]
        assert found[length - 1 :] == [[0, 0]] * (10 - length)


def test_true_trees_agree_with_themselves_and_others_as_counted() -> None:
    split = toy_data().test
    itself = agreement(split.spans.expand(2, -1, -1, -1), split.spans, split.lengths)
    long = split.lengths > 2
    assert (itself[:, long] == 1).all()
    assert itself[:, ~long].isnan().all()
    assert (~long).any()
    plain = merged_spans(left_branching(split.lengths, split.spans.shape[1]))
    found = agreement(plain, split.spans, split.lengths)
    for row, length in enumerate(split.lengths.tolist()):
        if length > 2:
            mine = {(0, end) for end in range(2, length)}
            true = {tuple(span) for span in split.spans[row, : length - 1].tolist()} - {(0, length)}
            assert found[row] == pytest.approx(len(mine & true) / (length - 2))
    assert 0 < found[long].mean() < 1


def test_depth_counts_open_operators() -> None:
    texts = ["3", "( ( ( [MAX 2 ) 9 ) ] )", "( ( ( [MAX 2 ) ( ( ( [MIN 1 ) 2 ) ] ) ) ] )"]
    longest = max(len(encode(text)) for text in texts)
    rows = [encode(text) + [0] * (longest - len(encode(text))) for text in texts]
    assert depths(torch.tensor(rows, dtype=torch.uint8)).tolist() == [0, 1, 2]


# The model


def test_models_start_as_published() -> None:
    d = 60
    model = TreeClassifier(Protocol("wide", width=d), [seeded(0), seeded(1)])
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


def test_dropout_keeps_the_mean_and_follows_the_generator() -> None:
    x = torch.ones(20_000)
    once, again = drop(x, 0.4, seeded(1)), drop(x, 0.4, seeded(1))
    assert torch.equal(once, again)
    assert_close(once[once != 0], torch.tensor(1 / 0.6).expand(int((once != 0).sum())), 1e-6)
    # Five standard deviations of the mean: a false failure in two million runs.
    assert once.mean().item() == pytest.approx(1, abs=5 * (0.4 / 0.6 / 20_000) ** 0.5)
    assert drop(x, 0.0, None) is x


# Runs


def toy_trainer() -> Trainer:
    runs = [Run(gapped.GST(), 0.02), Run(gapped.GumbelSoftmax(tau=0.5), 0.02)]
    return Trainer(toy_task(seeds=(1, 2), dtype=torch.float32), runs, 3, 5, CPU)


def test_resuming_changes_no_bit() -> None:
    whole = toy_trainer()
    for _ in range(3):
        whole.train_epoch()
    first = toy_trainer()
    first.train_epoch()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = toy_trainer()
    second.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        second.train_epoch()
    assert second.history == whole.history
    assert second.test() == whole.test()
    for a, b in zip(whole.parameters, second.parameters, strict=True):
        assert torch.equal(a, b)
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
            assert (count, max_tokens) == (PROTOCOLS["tiny"].count, PROTOCOLS["tiny"].max_tokens)

        def load(self, *_: object, **__: object) -> ListOps:
            return toy_data()

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
    trees = records.read(tmp_path, records.Trees)
    assert len(trees) == 4
    for example in trees[0].examples:
        words = example.tokens
        assert len(example.found) == len(example.true) == len(words) - 1
        assert example.found[-1] == [0, len(words)]
    assert not records.read(tmp_path, records.Images)
    assert records.read(tmp_path, records.Curve)[0].series.keys() >= {"train_cross_entropy", "valid_accuracy"}


# Specs and recipes


def test_the_paper_s_protocol() -> None:
    rules = protocol("paper")
    assert (rules.width, rules.dropout, rules.count, rules.max_tokens, rules.batch) == (
        300,
        0.5,
        90_000,
        100,
        16,
    )
    assert (rules.learning_rate, rules.epochs, rules.clip) == (1e-3, 20, 5.0)
    assert (rules.validations, rules.patience) == (2, 4)
    with pytest.raises(GappedError, match=r"^protocol: got 'papers', expected one of paper"):
        protocol("papers")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "mnist"}, r"data: got 'mnist', expected one of listops"),
        ({"protocol": "paper-30x10"}, r"protocol: got 'paper-30x10', expected one of paper"),
        ({"train_images": 5}, r"train_images: got 5, expected nothing: listops does not support it"),
        ({"split": "validation"}, r"split: got 'validation', expected nothing"),
        ({"variance_samples": 3}, r"variance_samples: got 3, expected nothing"),
    ],
)
def test_specs_accept_what_the_task_has(change: dict[str, Any], message: str) -> None:
    plain = {"task": "listops", "protocol": "paper", "data": "listops", "estimator": "gst"}
    RunSpec(**plain)
    with pytest.raises(GappedError, match=f"^{message}"):
        RunSpec(**{**plain, **change})


def test_the_paper_s_table_is_a_recipe() -> None:
    recipe = find_recipe("listops")
    assert len(recipe.entries) == 18 * 5
    assert {entry.spec.tau for entry in recipe.entries} == {1.0, 0.1, 0.01}
    assert {entry.spec.epochs for entry in recipe.entries} == {20}
    assert {entry.spec.data for entry in recipe.entries} == {"listops"}
    short = find_recipe("listops", seeds=3, epochs=10)
    assert len(short.entries) == 18 * 3
    assert {e.spec.epochs for e in find_recipe("listops", quick=True).entries} != {20}
    assert len(find_recipe("listops-more").entries) == 2 * 5
