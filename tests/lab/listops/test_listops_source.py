"""ListOps as a data set: official files, generated ones, the cache, the command."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from listops_text import decode, encode, spans_of, value_of
from tiny_images import REAL_DATA

from gapped.cli.app import main
from gapped.errors import GappedError
from gapped_lab import data, task_kinds
from gapped_lab.data import sources
from gapped_lab.listops import examples
from gapped_lab.listops.examples import as_characters, count_tokens, expressions
from gapped_lab.listops.language import generate
from gapped_lab.listops.source import LISTOPS, TEST, VALID, ListOps, ListOpsSource, OfficialFile

pytestmark = pytest.mark.usefixtures("no_data")
FILES = {file.name: sources.find("listops", file.name, REAL_DATA) for file in (VALID, TEST)}
needs_official = pytest.mark.skipif(
    None in FILES.values(),
    reason="no valid.tsv and test_d20s.tsv of ListOps in $GAPPED_DATA or ../shared/data",
)
# None of the splits is official, and all are small.
SMALL = ListOpsSource(count=300, valid=replace(VALID, count=40), test=replace(TEST, count=60))


def load(source: ListOpsSource, data_dir: Path | None = None) -> ListOps:
    return source.load(data_dir, progress=False, download=False)


def official_pairs(name: str) -> list[tuple[str, str]]:
    """Labels and expressions."""
    return [tuple(line.split("\t")) for line in examples.read(FILES[name]).decode().splitlines()]


@needs_official
def test_the_longest_expression_under_a_hundred_tokens_has_231_characters():
    split = examples.stack(
        expressions(examples.read(FILES[TEST.name]), FILES[TEST.name], max_tokens=100), True, 0
    )
    characters = as_characters(split)
    assert int(characters.lengths.max()) == 231
    assert len(characters.tokens.unique()) == 1 + 21


@needs_official
@pytest.mark.parametrize("name", FILES)
def test_every_official_label_and_tree_agrees(name):
    rows = official_pairs(name)
    parsed = list(expressions(examples.read(FILES[name]), FILES[name]))
    assert len(parsed) == len(rows) == {VALID.name: 1_000, TEST.name: 10_000}[name]
    assert [str(each.value) for each in parsed] == [label for label, _ in rows]
    assert [value_of(text) for _, text in rows] == [int(label) for label, _ in rows]
    for each, (_, text) in itertools.islice(zip(parsed, rows, strict=True), 400):
        assert list(each.spans) == spans_of(text.split())[1]


@needs_official
@pytest.mark.parametrize(
    "median", [statistics.median_low, statistics.median_high, lambda v: -(-statistics.median(v) // 1)]
)
def test_other_conventions_of_the_median_disagree(median):
    """The labels do tell them apart: lower, upper, and rounded up instead of down."""
    rows = official_pairs(VALID.name)
    assert sum(value_of(text, median) != int(label) for label, text in rows) > 50


@needs_official
def test_official_splits_are_used_where_present(tmp_path):
    got = load(ListOpsSource(count=500), REAL_DATA)
    assert (got.train.official, got.valid.official, got.test.official) == (False, True, True)
    assert (got.train.complete, got.valid.complete, got.test.complete) == (500, 1_000, 10_000)
    assert (len(got.valid), len(got.test)) == (857, 8_689)
    assert [path.name.split("-")[1] for path in cached(tmp_path)] == ["train"]
    labels = [int(label) for label, text in official_pairs(TEST.name) if len(encode(text)) < 100]
    assert got.test.labels.tolist() == labels
    held_out = {text for name in FILES for _, text in official_pairs(name)}
    drawn = {line.split("\t")[1] for line in cached(tmp_path)[0].read_text().splitlines()[1:]}
    assert len(drawn) == 500
    assert not drawn & held_out


@needs_official
@pytest.mark.parametrize(("operators", "same"), [(0.25, True), (0.22, False), (0.28, False)])
def test_length_law_beyond_repetitions(monkeypatch, operators, same):
    """Of expressions of 15 tokens or more, which hardly ever repeat, the share of 100 or more.

    4,000 expressions, seed 1, against the official test set. The samples are independent; 5 standard errors
    (0.054) bound the difference, which chance exceeds with probability 6e-7. Wrong shares of operators fail.
    """

    def share(lengths: list[int]) -> tuple[float, int]:
        long = [n >= 100 for n in lengths if n >= 15]
        return statistics.mean(long), len(long)

    monkeypatch.setattr("gapped_lab.listops.language._OPERATOR_SHARE", operators)
    theirs, n = share([count_tokens(text) for _, text in official_pairs(TEST.name)])
    ours, m = share([count_tokens(text) for _, text in generate(4_000, seed=1)])
    error = (theirs * (1 - theirs) * (1 / n + 1 / m)) ** 0.5
    assert (abs(ours - theirs) < 5 * error) == same


@needs_official
@pytest.mark.slow
def test_the_full_training_set(tmp_path):
    """90,000 expressions, seed 0, against the official test set: the same length law.

    The standard deviation of a length is 92, so the means differ by 1.0 by chance; 3 is allowed. The
    share under 100 tokens differs by 0.0036 by chance; 0.01 is allowed.
    """
    started = time.process_time()
    rows = generate(90_000, exclude={text for name in FILES for _, text in official_pairs(name)})
    assert time.process_time() - started < 30
    ours = [count_tokens(text) for _, text in rows]
    theirs = [count_tokens(text) for _, text in official_pairs(TEST.name)]
    assert len({text for _, text in rows}) == 90_000
    assert statistics.median(theirs) == 19
    assert abs(statistics.median(ours) - 19) <= 1
    assert statistics.mean(theirs) == pytest.approx(52.06, abs=0.01)
    assert statistics.mean(ours) == pytest.approx(statistics.mean(theirs), abs=3)
    under = [statistics.mean(n < 100 for n in lengths) for lengths in (ours, theirs)]
    assert under[1] == pytest.approx(0.8689, abs=1e-4)
    assert under[0] == pytest.approx(under[1], abs=0.01)
    got = load(LISTOPS, REAL_DATA)
    assert got.train.complete == 90_000
    assert len(got.train) == sum(n < 100 for n in ours)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "xdg" / "gapped" / "listops").iterdir())


def rows_of(split) -> list[str]:
    return [decode(row) for row in split.tokens.tolist()]


def test_without_official_files_all_splits_are_generated_and_say_so(tmp_path):
    got = SMALL.load(tmp_path / "nowhere", progress=True, download=False)
    splits = (got.train, got.valid, got.test)
    assert [split.official for split in splits] == [False] * 3
    assert [split.complete for split in splits] == [300, 40, 60]
    assert [path.name.split("-")[1] for path in cached(tmp_path)] == ["test", "train", "valid"]
    assert all(path.read_text().startswith("# generated by gapped {") for path in cached(tmp_path))
    texts = [line for path in cached(tmp_path) for line in path.read_text().splitlines()[1:]]
    assert len(texts) == len(set(texts)) == 400
    kept = [text for split in splits for text in rows_of(split)]
    assert len(kept) == len(set(kept)) == sum(len(split) for split in splits)
    assert 300 < len(kept) < 400
    assert all(int(split.lengths.max()) < 100 for split in splits)


def test_generated_files_cannot_be_taken_for_official_ones(tmp_path):
    load(SMALL)
    path = next(path for path in cached(tmp_path) if "test" in path.name)
    with pytest.raises(GappedError, match=r"line 1: no tab"):
        list(expressions(path.read_bytes(), path))
    path.rename(path.with_name(TEST.name))
    with pytest.raises(GappedError, match=r"test_d20s\.tsv, line 1: no tab"):
        load(SMALL)


def test_the_cache_is_read_not_made_again(tmp_path, monkeypatch):
    first = load(SMALL)
    monkeypatch.setattr("gapped_lab.listops.source.generate", None)
    again = load(SMALL)
    for one, two in ((first.train, again.train), (first.valid, again.valid), (first.test, again.test)):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.spans, two.spans)
        assert torch.equal(one.labels, two.labels)
    # The bound on the length is not part of what is cached, count and seed are.
    shorter = load(replace(SMALL, max_tokens=10))
    assert 0 < len(shorter.train) < len(again.train)
    for other in (replace(SMALL, seed=1), replace(SMALL, count=301)):
        with pytest.raises(TypeError):
            load(other)


def damage_flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)


def damage_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))


@pytest.mark.parametrize(
    "damage",
    [
        damage_flip,
        damage_header,
        lambda path: path.write_bytes(path.read_bytes()[:-200]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(gzip.compress(path.read_bytes())[:-9]),
    ],
    ids=["flip", "header", "torn", "empty", "gzip"],
)
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    first = load(SMALL)
    contents = {path: path.read_bytes() for path in cached(tmp_path)}
    path = next(path for path in contents if "valid" in path.name)
    damage(path)
    assert path.read_bytes() != contents[path]
    with pytest.warns(UserWarning, match=rf"^{path}: damaged.*; it is generated anew$") as caught:
        again = load(SMALL)
    assert len(caught) == 1
    assert torch.equal(again.valid.tokens, first.valid.tokens)
    assert {path: path.read_bytes() for path in cached(tmp_path)} == contents
    load(SMALL)


def test_an_interrupted_generation_leaves_whole_files(tmp_path, monkeypatch):
    write = examples.write_generated

    def stop_at_the_second(path, rows, recipe):
        if "train" not in path.name:
            raise KeyboardInterrupt
        write(path, rows, recipe)

    with monkeypatch.context() as patched:
        patched.setattr(examples, "write_generated", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            load(SMALL)
    (train,) = cached(tmp_path)
    content = train.read_bytes()
    load(SMALL)
    assert len(cached(tmp_path)) == 3
    assert train.read_bytes() == content


@pytest.mark.parametrize("method", ["load", "fetch"])
def test_generated_labels_are_checked_too(monkeypatch, method):
    wrong = [((label + 1) % 10, text) for label, text in generate(400)]
    monkeypatch.setattr("gapped_lab.listops.source.generate", lambda *_, **__: list(wrong))
    with pytest.raises(GappedError, match=r"generated-train-\w+\.tsv, line 2: label"):
        getattr(SMALL, method)(None, progress=False, download=False)


def test_unwritable_cache(tmp_path):
    (tmp_path / "xdg").write_text("in the way")
    with pytest.raises(GappedError, match=r"cannot write .*generated-train.*XDG_CACHE_HOME"):
        load(SMALL)


@pytest.fixture
def with_test_file(tmp_path) -> tuple[ListOpsSource, Path]:
    """A source whose test file is present, and full of what the seed would draw for training."""
    content = "".join(f"{label}\t{text}\n" for label, text in generate(60, seed=0)).encode()
    path = tmp_path / "sets" / "listops" / TEST.name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return replace(SMALL, test=OfficialFile(TEST.name, 60, hashlib.sha256(content).hexdigest())), path


def test_one_official_file_the_other_generated(tmp_path, with_test_file):
    source, path = with_test_file
    got = load(source, tmp_path / "sets")
    assert (got.train.official, got.valid.official, got.test.official) == (False, False, True)
    held_out = {line.split("\t")[1] for line in path.read_text().splitlines()}
    texts = [line.split("\t")[1] for made in cached(tmp_path) for line in made.read_text().splitlines()[1:]]
    assert len(texts) == len(set(texts)) == 340
    assert not held_out & set(texts)
    # Without the file, the same seed does draw its expressions.
    load(SMALL)
    everything = "".join(made.read_text() for made in cached(tmp_path))
    assert sum(f"\t{text}\n" in everything for text in held_out) > 30


def test_a_packed_official_file(tmp_path, with_test_file):
    source, path = with_test_file
    plain = load(source, tmp_path / "sets")
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    packed = load(source, tmp_path / "sets")
    assert packed.test.official
    assert torch.equal(packed.test.tokens, plain.test.tokens)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(b"9\t9\n" * 100)[:-9])
    with pytest.raises(GappedError, match=r"test_d20s\.tsv\.gz: damaged gzip file"):
        load(source, tmp_path / "sets")


def test_a_wrong_official_file(tmp_path, with_test_file):
    source, path = with_test_file
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(GappedError, match=rf"^{path}: sha256 .* \(not the published file\)"):
        load(source, tmp_path / "sets")
    path.write_text("".join([*lines[:7], lines[7].replace("\t", " "), *lines[8:]]))
    with pytest.raises(GappedError, match=rf"^{path}, line 8: no tab"):
        source.fetch(tmp_path / "sets", progress=False, download=False)


def test_only_expressions_under_the_bound_are_kept(tmp_path, with_test_file):
    source, path = with_test_file
    lengths = [count_tokens(line) for line in path.read_text().splitlines()]
    bound = next(n for n in sorted(lengths) if n > 8)
    got = load(replace(source, max_tokens=bound), tmp_path / "sets")
    assert got.test.lengths.tolist() == [n for n in lengths if n < bound]
    assert bound in lengths
    assert got.test.tokens.shape[1] == max(n for n in lengths if n < bound)
    assert got.max_tokens == bound


@pytest.mark.parametrize("how", [{"max_tokens": 1}, {"max_tokens": 40_000}, {"count": 0}])
def test_source_rejects(how):
    with pytest.raises(GappedError, match=next(iter(how))):
        ListOpsSource(**how)


def test_locate_reads_nothing_and_fetch_verifies(tmp_path, with_test_file):
    source, path = with_test_file
    sets = tmp_path / "sets"
    before = [(part.name, part.place) for part in source.locate(sets)]
    assert before == [("train (to be generated)", None), ("valid (to be generated)", None), (TEST.name, path)]
    assert not (tmp_path / "xdg").exists()
    parts = source.fetch(sets, progress=False, download=False)
    assert [part.name for part in parts] == ["train (generated)", "valid (generated)", TEST.name]
    assert {part.verification for part in parts} == {"sha256, labels"}
    assert [part.place for part in source.locate(sets)] == [part.place for part in parts]
    assert sorted(part.place for part in parts[:2]) == cached(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys):
    def printed(*arguments: str) -> str:
        assert main(["data", *arguments]) == 0
        return capsys.readouterr().out

    assert task_kinds.SOURCES["listops"] is LISTOPS
    assert "listops" not in data.IMAGES
    monkeypatch.setattr(task_kinds, "SOURCES", {"listops": SMALL})
    assert printed().startswith("listops\t90,000 + 1,000 + 10,000 ")
    splits = ("train", "valid", "test")
    assert printed().endswith(f"\tmissing: {', '.join(f'{split} (to be generated)' for split in splits)}\n")
    cells = [line.split("\t") for line in printed("listops").splitlines()]
    assert [row[:2] for row in cells] == [[f"{split} (generated)", "sha256, labels"] for split in splits]
    assert sorted(Path(row[2]) for row in cells) == cached(tmp_path)
    assert printed().endswith(f"\t{tmp_path / 'xdg' / 'gapped' / 'listops'}\n")
