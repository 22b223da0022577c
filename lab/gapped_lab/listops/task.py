"""ListOps as a fleet's task: batches by length, losses, validation, test, trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.errors import reject
from gapped_lab.fleet import Task, derived_seed, permutation
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.fleet.optimizer import SelectionRule
from gapped_lab.fleet.run_layers import generators, spread
from gapped_lab.listops import ListOpsProtocol
from gapped_lab.listops.examples import Split, as_characters, buckets
from gapped_lab.listops.language import CLOSE, OPEN, VOCABULARY
from gapped_lab.listops.model import CLASSES, TreeClassifier
from gapped_lab.listops.source import ListOps
from gapped_lab.listops.spans import agreement, left_branching, merged_spans
from gapped_lab.listops.variants import evaluation_sampler

# Tokens that a run parses at a time, padding included: at a width of 300, each takes some 50 kB.
_CHUNK = 6400
# A batch of a group of all lengths is padded to a multiple of this number, not to the group's longest.
_WIDTHS = 32
# Lower edges of the bins in which accuracy is reported; the last has no upper one.
LENGTHS = (1, 10, 20, 40, 70)
DEPTHS = (0, 1, 2, 3, 4, 5, 6)
# The first test expression of each of these numbers of tokens, or the next larger, is shown.
_SIZES = (6, 11, 16)


class _Bucket(NamedTuple):
    """Training expressions of similar length, padded to the longest."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


class Parsed(NamedTuple):
    """Predictions and trees of greedy models for n expressions."""

    right: Tensor
    """Whether the class is right, ``(R, n)``; NaN where the logits are not finite."""
    predicted: Tensor
    merges: Tensor
    """The trees, ``(R, n, L - 1)``, as `merged_spans` takes them."""


class ListOpsTask(Task):
    """R classifiers with the data on the device.

    The lengths of an epoch's batches are the same for all runs, in an order drawn for the epoch; the
    examples of a batch are each run's own. A last batch that its bucket cannot fill sits out the epoch.
    """

    row_axes = 1
    loss_name = "cross_entropy"
    model: TreeClassifier

    def __init__(
        self,
        protocol: ListOpsProtocol,
        data: ListOps,
        seeds: Sequence[int],
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.protocol, self.seeds = protocol, list(seeds)
        self.clip = protocol.clip
        self.selection = SelectionRule(
            "valid_accuracy", self.valid_accuracy, protocol.validations, protocol.patience
        )
        self._distinct = sorted(set(self.seeds))
        self._places = torch.tensor([self._distinct.index(seed) for seed in self.seeds], device=device)
        self.model = TreeClassifier(protocol, generators(self._distinct))
        self.model.to(device, dtype)
        spread(self.model, self._places.tolist())
        self.watched = {"query": self.model.query}
        read = as_characters if protocol.characters else lambda split: split
        self.valid, self.test = read(data.valid), read(data.test)
        self.official = data.valid.official and data.test.official
        self.buckets = _buckets(read(data.train), protocol, device)
        counts = [len(bucket.labels) // protocol.batch for bucket in self.buckets]
        self._sequence = torch.repeat_interleave(torch.tensor(counts))
        self.steps = len(self._sequence)
        self.batch = torch.zeros(len(self.seeds), protocol.batch, dtype=torch.int64, device=device)
        self._schedule: list[tuple[int, int]] = []
        self._orders: list[Tensor] = []
        self._widths: list[list[int]] = []
        self._bucket, self._width = 0, 0

    def start_epoch(self, epoch: int) -> None:
        """The bucket of each step; for each run, the order of the examples in each bucket; batch widths."""
        sequence = self._sequence[permutation(self.steps, "buckets", epoch)].tolist()
        turns = [count() for _ in self.buckets]
        self._schedule = [(bucket, next(turns[bucket])) for bucket in sequence]
        self._orders, self._widths = [], []
        for number, bucket in enumerate(self.buckets):
            size = len(bucket.labels)
            orders = [permutation(size, seed, epoch, number) for seed in self._distinct]
            self._orders.append(torch.stack(orders).to(self.batch.device)[self._places])
            self._widths.append(self._pad(bucket, self._orders[-1]))

    def load_batch(self, step: int) -> None:
        self._bucket, turn = self._schedule[step]
        self._width = self._widths[self._bucket][turn]
        size = self.protocol.batch
        self.batch.copy_(self._orders[self._bucket][:, turn * size : (turn + 1) * size])

    def program(self, step: int) -> tuple[int, int]:
        """The step's bucket, and how many tokens its batch is padded to."""
        bucket, turn = self._schedule[step]
        return bucket, self._widths[bucket][turn]

    def _pad(self, bucket: _Bucket, orders: Tensor) -> list[int]:
        """To how many tokens each batch of a bucket is padded, the same for all runs."""
        size = self.protocol.batch
        turns, widest = len(bucket.labels) // size, bucket.tokens.shape[1]
        if self.protocol.waste < 1:
            return [widest] * turns
        longest = bucket.lengths[orders[:, : turns * size]].view(-1, turns, size).amax((0, 2)).tolist()
        return [min(-(-length // _WIDTHS) * _WIDTHS, widest) for length in longest]

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy of the loaded batch, with sampled trees."""
        bucket = self.buckets[self._bucket]
        tokens, lengths = bucket.tokens[:, : self._width][self.batch], bucket.lengths[self.batch]
        logits, _ = self.model(tokens, lengths, sampler, generator)
        labels = bucket.labels[self.batch]
        losses = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none")
        return losses.view(labels.shape).mean(1)

    def valid_accuracy(self, sampler: Grouped) -> Tensor:
        """Accuracy of greedy trees on the validation split."""
        return self.parse(self.valid, sampler).right.double().mean(1)

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        """Accuracy of greedy trees on the test split, in all and by depth.

        If the model reads tokens, also by their number, and the F1 of the trees: the true parse has no
        trees over characters.
        """
        test = self.test
        parsed = self.parse(test, sampler)
        right = parsed.right.double()
        metrics = {"test_accuracy": right.mean(1)}
        for name, values, edges in (
            ("length", test.lengths, () if self.protocol.characters else LENGTHS),
            ("depth", depths(test.tokens), DEPTHS),
        ):
            for low, high in zip(edges, (*edges[1:], None), strict=False):
                inside = (values >= low) & (values < (high or values.max() + 1))
                if inside.any():
                    accuracy = right[:, inside.to(right.device)].mean(1)
                    metrics[f"test_accuracy_{name}_{bin_name(low, high)}"] = accuracy
        if self.protocol.characters:
            return metrics
        true = test.spans.to(right.device), test.lengths.to(right.device)
        metrics["test_tree_f1"] = agreement(merged_spans(parsed.merges), *true).nanmean(1)
        plain = merged_spans(left_branching(test.lengths, test.spans.shape[1]))
        baseline = agreement(plain, test.spans, test.lengths).nanmean()
        metrics["left_branching_f1"] = baseline.to(right.device).expand(len(self.seeds))
        return metrics

    def show(
        self, sampler: Grouped, generator: torch.Generator, places: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """For each run: a few test expressions with label, prediction, and both trees as lists of spans.

        None where the model reads characters.
        """
        if self.protocol.characters:
            return
        few = _few(self.test)
        parsed = self.parse(few, sampler)
        spans = merged_spans(parsed.merges)
        for place in places:
            examples = []
            for row, length in enumerate(few.lengths.tolist()):
                inner = slice(0, length - 1)
                examples.append(
                    {
                        "tokens": [VOCABULARY[i] for i in few.tokens[row, :length].tolist()],
                        "label": int(few.labels[row]),
                        "predicted": int(parsed.predicted[place, row]),
                        "true": few.spans[row, inner].tolist(),
                        "found": spans[place, row, inner].tolist(),
                    }
                )
            yield {"examples": examples}

    @torch.no_grad()
    def parse(self, split: Split, sampler: Grouped) -> Parsed:
        """Classes and trees of all expressions of a split, by all runs.

        Trees are greedy, but for runs whose trees do not depend on scores. Random ones are the same at every
        call.
        """
        runs, device = len(self.seeds), self.batch.device
        policy, noise = (
            evaluation_sampler(sampler),
            torch.Generator(device).manual_seed(derived_seed("trees")),
        )
        # Moved once, and no value is read back: the host never waits for a chunk.
        tokens, lengths, labels = (x.to(device) for x in (split.tokens, split.lengths, split.labels))
        right = torch.empty(runs, len(split), device=device)
        predicted = torch.empty(runs, len(split), dtype=torch.int64, device=device)
        merges = predicted.new_full((runs, len(split), tokens.shape[1] - 1), -1)
        for rows, longest in _chunks(split.lengths, device):
            shape = (runs, len(rows))
            logits, trees = self.model(
                tokens[rows, :longest].long().expand(*shape, longest),
                lengths[rows].expand(shape),
                policy,
                noise,
                dropout=False,
            )
            guess = logits.argmax(-1)
            right[:, rows] = torch.where(logits.isfinite().all(-1), guess == labels[rows], torch.nan)
            predicted[:, rows] = guess
            merges[:, rows, : longest - 1] = trees
        return Parsed(right, predicted, merges)


def bin_name(low: int, high: int | None) -> str:
    """The name of a bin in the name of a metric.

    >>> bin_name(1, 10), bin_name(3, 4), bin_name(6, None)
    ('1_to_9', '3', '6_up')
    """
    if high is None:
        return f"{low}_up"
    return str(low) if high == low + 1 else f"{low}_to_{high - 1}"


def depths(tokens: Tensor) -> Tensor:
    """How many operators are open at most, ``(N,)``: 0 for a digit alone."""
    steps = (tokens == OPEN).long() - (tokens == CLOSE).long()
    return steps.cumsum(1).amax(1)


def _few(split: Split) -> Split:
    """The first expression of each of a few lengths."""
    present = sorted(set(split.lengths.tolist()))
    lengths = [next((n for n in present if n >= size), present[-1]) for size in _SIZES]
    rows = torch.tensor([int((split.lengths == n).nonzero()[0]) for n in dict.fromkeys(lengths)])
    columns = {name: getattr(split, name)[rows] for name in ("tokens", "lengths", "labels", "spans")}
    return replace(split, **columns)


def _buckets(train: Split, protocol: ListOpsProtocol, device: torch.device) -> list[_Bucket]:
    """The training data in buckets that fill at least one batch each."""
    result = []
    for rows in buckets(train.lengths, protocol.waste):
        if len(rows) >= protocol.batch:
            lengths = train.lengths[rows]
            tokens = train.tokens[rows, : int(lengths.max())].long()
            result.append(_Bucket(tokens.to(device), lengths.to(device), train.labels[rows].to(device)))
    if not result:
        raise reject("count", len(train), f"enough expressions for a batch of {protocol.batch}")
    return result


def _chunks(lengths: Tensor, device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Places of some expressions and the longest's length, as many at a time as `_CHUNK` allows.

    Shortest first, and on the `device`; `lengths` are on the CPU, so that reading them does not synchronise.
    """
    order = torch.argsort(lengths, stable=True)
    places, start = order.to(device), 0
    ordered = lengths[order].tolist()
    for stop, length in enumerate(ordered):
        if stop > start and (stop + 1 - start) * length > _CHUNK:
            yield places[start:stop], ordered[stop - 1]
            start = stop
    yield places[start:], ordered[-1]
