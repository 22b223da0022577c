"""A small language model that is fine-tuned by a reward through the words that it samples.

The model is a recurrent network over the 3,000 most frequent words of Python's own reference manual, which
the standard library contains (`pydoc_data.topics`). First it learns to predict the next word. Then it writes
twelve words after each context, and the reward asks that they have six letters on average, whichever they
are: minus the squared difference, for each text. A sampled word is fed back as its embedding.

`gapped.rollout` writes the words without a tensor of logits, and feeds each back as its embedding. A pathwise
estimator sends the reward's gradient back through the words. RLOO needs the rewards of words that are drawn
without a gradient, and their log-probabilities, from `gapped.linear_choice`. All have as many texts a step:
RLOO writes four for each of a quarter of the contexts.

The table has the mean reward in each quarter of the steps, what the model's prediction of held-out text lost
by it in nats a word, the standard deviation of the first gradient over the norm of its mean, processor time
of a step, and the peak memory of a gradient. Run with `python examples/word_model.py`; `--out FOLDER` appends
what each run found, step by step, to `tuning.jsonl` there.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from common import compare, options
from torch import Tensor, nn

import gapped
from gapped.comparison.records import write
from gapped.comparison.runs import describe
from gapped_lab.bench.timing import peak_memory
from gapped_lab.records import Tuning

WORDS, WIDTH, CONTEXT, LENGTH, BATCH = 3000, 64, 16, 12, 32
PRETRAINING, LETTERS = 300, 6.0


@cache
def text() -> tuple[Tensor, Tensor]:
    """The numbers of all words, and how many letters each word of the vocabulary has."""
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]+|[^\sa-z]", " ".join(topics[name] for name in sorted(topics)).lower())
    known = [word for word, _ in Counter(words).most_common(WORDS - 1)]
    number = {word: n for n, word in enumerate(known, 1)}
    letters = [0, *(len(word) if word.isalpha() else 0 for word in known)]
    return torch.tensor([number.get(word, 0) for word in words]), torch.tensor(letters, dtype=torch.float32)


class Model(nn.Module):
    """Words to states whose products with the embeddings are the next word's logits: what a rollout takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, _weight=torch.randn(WORDS, WIDTH) / WIDTH**0.5)
        self.cell = nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.head.bias)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self, inputs_embeds: Tensor, past_key_values: Tensor | None = None, use_cache: bool = True
    ) -> SimpleNamespace:
        """The states before each next word, and the memory of the recurrent layer."""
        states, memory = self.cell(inputs_embeds, past_key_values)
        return SimpleNamespace(last_hidden_state=self.out(states), past_key_values=memory)

    def loss(self, words: Tensor) -> Tensor:
        """Nats per word of texts ``(batch, time)``."""
        logits = self.head(self(self.embedding(words[:, :-1])).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def log_prob(self, context: Tensor, words: Tensor) -> Tensor:
        """The log-probabilities of words ``(batch, LENGTH)`` that are given, behind their context."""
        before = torch.cat([context, words[:, :-1]], 1)
        states = self(self.embedding(before)).last_hidden_state[:, -words.shape[1] :]
        return gapped.linear_choice(states, self.head.weight, self.head.bias, index=words).log_prob


def batch(size: int, length: int, generator: torch.Generator, is_test: bool = False) -> Tensor:
    """Texts ``(size, length)`` from the first nine tenths of the manual, or from the last."""
    words, _ = text()
    words = words[len(words) * 9 // 10 :] if is_test else words[: len(words) * 9 // 10]
    starts = torch.randint(len(words) - length, (size, 1), generator=generator)
    return words[starts + torch.arange(length)]


@cache
def pretrained() -> Model:
    torch.manual_seed(0)
    model, data = Model(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(PRETRAINING):
        optimiser.zero_grad()
        model.loss(batch(BATCH, 2 * CONTEXT, data)).backward()
        optimiser.step()
    return model


def test_loss(model: Model) -> float:
    with torch.no_grad():
        return float(model.loss(batch(200, 2 * CONTEXT, torch.Generator().manual_seed(1), is_test=True)))


def objective(
    model: Model, context: Tensor, estimator: gapped.Pathwise | gapped.Score
) -> tuple[Tensor, Tensor]:
    """Something whose gradient estimates that of the mean reward, and the mean reward."""
    _, letters = text()
    if isinstance(estimator, gapped.Pathwise):
        words = gapped.rollout(model, model.embedding(context), LENGTH, estimator=estimator)
        reward = -(words.select(letters).mean(1) - LETTERS).square()
        return reward.mean(), reward.mean().detach()
    assert isinstance(estimator, gapped.RLOO)
    texts = context[: len(context) // estimator.samples].repeat(estimator.samples, 1)
    with torch.no_grad():
        index = gapped.rollout(model, texts, LENGTH).index
    reward = -(letters[index].mean(1) - LETTERS).square().view(estimator.samples, -1)
    advantage = (reward - reward.mean(0)) * estimator.samples / (estimator.samples - 1)
    return (advantage.flatten() * model.log_prob(texts, index).sum(1)).mean(), reward.mean()


def spread(
    model: Model, context: Tensor, estimator: gapped.Pathwise | gapped.Score, draws: int = 16
) -> float:
    """The standard deviation of the gradient over its mean's norm, at the same contexts."""
    gradients = []
    for _ in range(draws):
        surrogate, _ = objective(model, context, estimator)
        parts = torch.autograd.grad(surrogate, list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    variance, mean = torch.var_mean(torch.stack(gradients).double(), 0)
    # The mean of so many draws has a part of the variance.
    return float((variance.sum() / (mean.square().sum() - variance.sum() / draws).clamp(min=1e-12)).sqrt())


def train(
    estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int, out: Path | None = None
) -> dict[str, float | list[float]]:
    model, data = deepcopy(pretrained()), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    context = batch(BATCH, CONTEXT, data)
    noise = spread(model, context, estimator)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-4)
    rewards = torch.empty(steps)
    began = time.process_time()
    for step in range(steps):
        optimiser.zero_grad()
        surrogate, rewards[step] = objective(model, batch(BATCH, CONTEXT, data), estimator)
        (-surrogate).backward()
        optimiser.step()
    seconds = (time.process_time() - began) / steps

    def gradient() -> object:
        return torch.autograd.grad(objective(model, context, estimator)[0], list(model.parameters()))

    device = torch.device("cpu")
    lost, memory = test_loss(model) - test_loss(pretrained()), peak_memory(gradient, device) / 2**20
    if out is not None:
        found = {"nats_lost": lost, "spread": noise, "milliseconds": 1e3 * seconds, "memory": memory}
        which = {"estimator": estimator.name, "seed": seed, "environment": describe(device)}
        write(out, [Tuning(**which, rewards=rewards.tolist(), **found)])
    return {
        "reward by quarter of the steps": [float(part.mean()) for part in rewards.tensor_split(4)],
        "nats lost": lost,
        "gradient sd / mean": noise,
        "ms a step": 1e3 * seconds,
        "MiB a step": memory,
    }


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax:tau=1", "gumbel-rao:tau=0.5", "rloo"]
    parser = options(__doc__, steps=60, estimators=estimators, seeds=2, family=object, tunable=False)
    parser.add_argument("--out", type=Path, help="a folder of records")
    arguments = parser.parse_args()
    print(f"{len(text()[0])} words of text; {test_loss(pretrained()):.2f} nats a word before\n")
    compare(partial(train, out=arguments.out), arguments)


if __name__ == "__main__":
    main()
