"""The examples run, learn, and print what their page says they print."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import EXAMPLE_PAGES
from subprocesses import environment, python

import gapped
from gapped.cli.command import load_function

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in EXAMPLE_PAGES)
PAIR = ["gst:gap=1.2,tau=0.5", "straight-through:tau=1.0"]
Table = dict[str, dict[str, list[float]]]


def table_in(printed: str) -> Table:
    """The table among printed lines: row and column to the numbers of the cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line
    ]
    head, _, *body = rows
    return {
        row[0]: {
            name: [float(number) for number in cell.partition("±")[0].split()]
            for name, cell in zip(head[1:], row[1:], strict=True)
        }
        for row in body
    }


class Runner:
    """Runs examples in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def names(self, example: str, run_name: str = "example") -> dict[str, Any]:
        """The names that an example defines; called as ``"__main__"`` it runs."""
        self.monkeypatch.syspath_prepend(str(EXAMPLES))
        with torch.random.fork_rng():
            return runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name=run_name)

    def printed(self, example: str, *options: str) -> str:
        self.monkeypatch.setattr(sys, "argv", [f"{example}.py", *options])
        self.names(example, "__main__")
        return self.capsys.readouterr().out

    def table(self, example: str, steps: int, *estimators: str) -> Table:
        """The table that an example prints for one seed."""
        options = [word for name in estimators for word in ("--estimator", name)]
        printed = self.printed(example, "--steps", str(steps), "--seeds", "1", *options)
        check_columns(printed)
        return table_in(printed)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def check_columns(printed: str) -> None:
    """The page shows a table with the same columns."""
    (head,) = (line for line in printed.splitlines() if re.match(r"\| estimator ", line))
    names = [name.strip() for name in head.split("|")]
    assert names in [[name.strip() for name in line.split("|")] for line in PAGE.splitlines()]


def started(*command: str) -> str:
    """The output of a command in a fresh interpreter with warnings as errors."""
    printed = python("-W", "error", *command, env=environment(EXAMPLES))
    check_columns(printed)
    return printed


@pytest.mark.parametrize(
    ("name", "column", "steps", "factor"),
    [
        ("vq_autoencoder", "test error", 60, 0.4),
        ("moe_router", "test error", 120, 0.2),
        ("feature_selection", "test error", 150, 0.7),
        ("policy", "above the best plan", 80, 0.3),
    ],
)
def test_training_helps(run: Runner, name: str, column: str, steps: int, factor: float) -> None:
    """After some steps every estimator is clearly better than after one."""
    first, last = (run.table(name, count, *PAIR) for count in (1, steps))
    assert list(first) == list(last) == PAIR
    for estimator in last:
        assert last[estimator][column][0] < factor * first[estimator][column][0]
        if name == "vq_autoencoder":
            assert 2 < last[estimator]["perplexity"][0] <= last[estimator]["codes used"][0] <= 32
        if name == "moe_router":  # one expert is down
            loads = first[estimator]["load, sorted"]
            assert loads[0] == 0
            assert sum(loads) == pytest.approx(1, abs=0.03)


def test_a_row_for_every_default_and_a_mean_over_seeds(run: Runner) -> None:
    printed = run.printed("policy", "--steps", "1", "--seeds", "2")
    names = ["gapmax", "gst", "gumbel-softmax", "reinmax", "reinforce", "rloo"]
    assert list(table_in(printed)) == names
    assert printed.count("±") == 2 * 6 + 1


def test_tuning_chooses_the_lowest_on_a_seed_of_its_own(run: Runner, tmp_path: Path) -> None:
    names = run.names("common")
    calls = []

    def train(estimator: gapped.GST, steps: int, seed: int) -> dict[str, float]:
        calls.append((estimator.tau, seed))
        return {"error": abs(estimator.tau - 0.55) + seed}

    parser = names["options"]("What it shows.\nMore.", steps=1, estimators=["gst"], seeds=2)
    figure = tmp_path / "a.svg"
    names["compare"](train, parser.parse_args(["--tune", "--figure", str(figure)]))
    printed = run.capsys.readouterr().out
    assert list(table_in(printed)) == ["gst", "tuned: gst:tau=0.5"]
    assert "the best of 5 settings on seed 2, not in the table" in printed
    assert calls == [
        (0.85, 0),
        (0.85, 1),
        *((tau, 2) for tau in (0.85, 0.3, 0.5, 0.7, 1.0)),
        (0.5, 0),
        (0.5, 1),
    ]
    svg = figure.read_text("utf-8")
    assert 'aria-label="What it shows."' in svg
    assert "tuned: gst:tau=0.5: 0.55" in svg


@pytest.mark.parametrize(
    "name", ["quickstart", "vq_autoencoder", "moe_router", "feature_selection", "policy", "sudoku"]
)
def test_what_was_learned_is_drawn(run: Runner, tmp_path: Path, name: str) -> None:
    figure = tmp_path / f"{name}.svg"
    options = ["--steps", "1", "--seeds", "1", "--estimator", "gst:gap=auto", "--figure", str(figure)]
    run.printed(name, *options)
    (blue, other) = (figure.read_text("utf-8").count(f"var(--series-{number}, ") for number in (1, 2))
    # The colour of gst in all figures, and of no other estimator; digits are grey.
    assert blue >= 2
    assert other == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--estimator", "gts"], "estimator: got 'gts'; did you mean gst? Expected one of"),
        (["--estimator", "gst:gap=-1"], "gap: got -1"),
        (["--steps", "0"], "expected a whole number of at least one"),
    ],
    ids=lambda value: str(value),
)
def test_a_wrong_option_is_answered(run: Runner, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.printed("vq_autoencoder", *options)
    assert stopped.value.code == 2
    assert message in run.capsys.readouterr().err


def test_the_relevant_features_are_found(run: Runner) -> None:
    row = run.table("feature_selection", 250, "gst:tau=1.0")["gst:tau=1.0"]
    assert row["relevant found"][0] > 0.6  # two of three; 0.1 by chance
    names = run.names("feature_selection")
    picks = names["Selector"](gapped.GST())(100)
    assert ((picks == 0) | (picks == 1)).all()
    assert (picks.sum(-1) == names["PICKS"]).all()


def test_sudoku_counts_violations_and_learns(run: Runner) -> None:
    names = run.names("sudoku")
    generator = torch.Generator().manual_seed(0)
    grid = names["solution"](generator)
    one_hot = torch.nn.functional.one_hot(grid, 9).float()
    assert names["violations"](one_hot) == 0
    one_hot[[0, 1]] = one_hot[[1, 0]]  # their row and box stay right, two columns have two faults each
    assert names["violations"](one_hot) == 2 * 2
    estimator = "straight-through:tau=1.0"
    first, last = (run.table("sudoku", steps, estimator) for steps in (1, 60))
    cost = "least violations"
    assert last[estimator][cost][0] < first[estimator][cost][0] / 2
    assert last[estimator]["steps"][0] <= 60


@pytest.mark.parametrize("estimator", [gapped.GST(), gapped.RLOO(4)], ids=repr)
def test_the_word_model_is_tuned_by_its_reward(run: Runner, estimator: Any) -> None:
    names = run.names("word_model")
    # The functions of an example look their constants up among its names.
    names["train"].__globals__.update(PRETRAINING=3, WORDS=300, BATCH=8, LENGTH=4)
    result = names["train"](estimator, 12, 0)
    assert len(result["reward by quarter of the steps"]) == 4
    assert result["reward by quarter of the steps"][-1] > result["reward by quarter of the steps"][0]
    heads = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()]
    assert ["estimator", *result] in heads


@pytest.mark.parametrize("estimator", [gapped.GST(), gapped.RLOO(4), gapped.Exact()], ids=repr)
def test_the_policy_takes_no_action_that_is_masked(run: Runner, estimator: Any) -> None:
    names = run.names("policy")
    state, works = names["states"](20, torch.Generator().manual_seed(0))
    assert not works.all()
    plans = []

    def cost(plan: torch.Tensor) -> torch.Tensor:
        plans.append(plan.detach())
        return names["simulate"](plan, state)

    logits = torch.zeros(20, names["TIMES"], 5, requires_grad=True)
    gapped.expectation(cost, logits, estimator, mask=works).sum().backward()
    assert all((plan * ~works).count_nonzero() == 0 for plan in plans)
    assert (logits.grad * ~works).count_nonzero() == 0
    assert logits.grad.count_nonzero() > 0


def test_the_best_plan_is_the_best(run: Runner) -> None:
    names = run.names("policy")
    state, works = names["states"](3, torch.Generator().manual_seed(1))
    best = []
    for puck in range(3):
        able = [action for action in range(5) if works[puck, 0, action]]
        plans = torch.eye(5)[list(itertools.product(able, repeat=names["TIMES"]))].unsqueeze(1)
        best.append(float(names["simulate"](plans, state[puck : puck + 1]).min()))
    assert names["best_cost"](state, works) == pytest.approx(sum(best) / 3, rel=1e-5)


def test_the_discrete_vae_learns_with_soft_and_hard_samples(run: Runner, tmp_path: Path) -> None:
    names = run.names("discrete_vae")
    small = {"data": "digits", "codes": 16, "images": 300, "epochs": 2, "batch": 30, "pictures": tmp_path}
    for estimator in (gapped.GumbelSoftmax(1.0, hard=False), gapped.GapMax()):
        with torch.random.fork_rng():
            first, last = names["train"](estimator, 0, **small)
        assert last["test negative ELBO"] < 0.95 * first["test negative ELBO"]
        for row in (first, last):
            assert row["test negative ELBO"] == pytest.approx(row["reconstruction"] + row["KL"])
            assert 0 < row["KL"] < 49 * math.log(16)
            assert 1 <= row["perplexity"] <= row["codes used"] <= 16
        pixels = torch.load(tmp_path / names["file_of"](estimator), weights_only=True)
        assert pixels.shape == (10, 1, 28, 28)


def test_the_discrete_vae_is_judged_by_hard_samples(run: Runner) -> None:
    """A codebook whose mixtures decode to grey, but each entry alone to black or to white."""
    names = run.names("discrete_vae")
    with torch.random.fork_rng():
        model = names["DiscreteVAE"](2)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    model.codebook.data = torch.tensor([[-60.0], [60.0]]).expand(2, 64).clone()
    model.decode = lambda entries: entries.mean(-1).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    images = torch.ones(8, 1, 28, 28)
    with torch.random.fork_rng():
        row = names["evaluate"](model, images, gapped.GumbelSoftmax(50.0, hard=False))
    # A white pixel costs nothing, a black one 60 nats: half of 784 each, within seven standard deviations.
    assert row["reconstruction"] == pytest.approx(30 * 784, rel=7 / (8 * 49) ** 0.5)
    assert row["KL"] == pytest.approx(0, abs=1e-4)


def test_the_discrete_vae_is_found_by_the_name_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    (name,) = re.findall(r"gapped compare --train (\S+)", PAGE)
    assert load_function("--train", name).__doc__


def test_only_soft_samples_of_the_discrete_vae_are_annealed(run: Runner) -> None:
    annealed = run.names("discrete_vae")["annealed"]
    soft = gapped.GumbelSoftmax(1.0, hard=False)
    assert [annealed(soft, progress).tau for progress in (0.0, 0.5, 1.0)] == [1, (1 + 1 / 16) / 2, 1 / 16]
    assert annealed(gapped.GST(0.85), 1.0) == gapped.GST(0.85)


def test_the_discrete_vae_prints_its_tables_and_draws(run: Runner, tmp_path: Path) -> None:
    printed = run.printed("discrete_vae", "--quick", "--out", str(tmp_path))
    labels = list(run.names("discrete_vae")["ESTIMATORS"])
    for label in labels:
        assert len(re.findall(rf"^ ?{re.escape(label)}  .*\d$", printed, flags=re.M)) == 2
    assert all(len(line) <= 80 for line in printed.splitlines() if str(tmp_path) not in line)
    assert (tmp_path / "reconstructions.png").read_bytes().startswith(b"\x89PNG")
    head = next(line for line in printed.splitlines() if line.startswith("mean over seeds"))
    assert head in PAGE
    again = run.printed("discrete_vae", "--quick", "--out", str(tmp_path))
    assert "All 4 runs were in" in again, "finished runs are not trained again"
    assert again.startswith(printed[: printed.index("\n\n")]), "the same table"


# Starting processes takes longer than training, so one launch tries every way: first what the command line
# asks for, then the others.
EVERY_WAY = """
import json, os, sys
import ddp

train = ddp.train


def every_way(estimator, steps, seed, same_noise, fsdp):
    assert not same_noise and not fsdp
    own, same, sharded = (
        train(estimator, steps, seed, same_noise=same, fsdp=fsdp)
        for same, fsdp in ((False, False), (True, False), (False, True))
    )
    if ddp.dist.get_rank() == 0:
        print(json.dumps([own, same, sharded]))
    return own


ddp.train = every_way
ddp.main()
# In about one launch of thirty, gloo's threads abort a rank while its interpreter shuts down.
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_data_parallel_ranks_share_weights_and_not_noise(tmp_path: Path) -> None:
    script = tmp_path / "every_way.py"
    script.write_text(EVERY_WAY)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = started(*launch, str(script), "--estimator", "gst:tau=1.0", "--steps", "40")
    # Some releases of torch print about their connections first.
    own, same, sharded = json.loads(next(line for line in printed.splitlines() if line.startswith("[{")))
    assert table_in(printed)["gst:tau=1.0"] == {name: [pytest.approx(own[name], abs=5e-4)] for name in own}
    assert own["weights equal"] == same["weights equal"] == 1
    assert own["accuracy"] > 0.3
    # The trap: after torch.manual_seed on every rank the default generator draws the same everywhere.
    assert own["equal draws, default"] == 1
    # Two of 16 equally likely categories agree in one row of 16; seven standard deviations of 4,096 rows.
    assert own["equal draws, given"] == pytest.approx(1 / 16, abs=0.027)
    assert same["equal draws, given"] == 1
    assert same["test loss"] != own["test loss"]
    # FSDP with the same seeds and noise ends where DDP does, up to the order of sums.
    assert sharded == pytest.approx(own, rel=1e-3)


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed; it comes with gapped[examples]"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "column", "most"),
    [
        # 24.7 is what a single picture gives, and 64 log 2 = 44 what an untrained decoder gives.
        pytest.param("pyro_svi", 160, "test -log p(x)", 24.7, marks=needs("pyro")),
        pytest.param("lightning_vae", 80, "test negative ELBO", 32.0, marks=needs("lightning")),
    ],
)
def test_examples_of_other_packages_learn(name: str, steps: int, column: str, most: float) -> None:
    options = ["--steps", str(steps), "--seeds", "1", "--estimator", "gst:tau=1.0"]
    printed = started(str(EXAMPLES / f"{name}.py"), *options)
    assert table_in(printed)["gst:tau=1.0"][column][0] < most
