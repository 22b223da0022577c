"""ListOps: reading, evaluating, generating, caching. Results are compared with code written anew here."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from gapped.errors import GappedError
from gapped.lab import data
from gapped.lab.cli.data import data as data_command
from gapped.lab.data import folders
from gapped.lab.data.listops import (
    LISTOPS,
    PADDING,
    VOCABULARY,
    ListOpsSource,
    buckets,
    decode,
    encode,
    evaluate,
    generate,
    load,
    parse,
)
from gapped.lab.data.listops import files as listops_files
from gapped.lab.data.listops.examples import stack
from gapped.lab.data.listops.files import count_tokens, examples
from gapped.lab.data.listops.generator import MAX_DEPTH, draw
from gapped.lab.data.listops.source import TEST, VALID, OfficialFile


def official_folder() -> Path:
    """Where this machine has data, looked up before the tests hide the environment."""
    named = os.environ.get("GAPPED_DATA")
    return (Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data").expanduser()


REAL = official_folder()
FILES = {
    file.name: folders.find("listops", file.name, REAL) if REAL.is_dir() else None for file in (VALID, TEST)
}
needs_official = pytest.mark.skipif(
    None in FILES.values(),
    reason="no valid.tsv and test_d20s.tsv of ListOps in $GAPPED_DATA or ../shared/data",
)
# None of the splits is official, and all are small.
SMALL = ListOpsSource(count=300, valid=replace(VALID, count=40), test=replace(TEST, count=60))


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GAPPED_DATA", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def official_rows(name: str) -> list[tuple[str, str]]:
    lines = listops_files.read(FILES[name]).decode().splitlines()
    return [tuple(line.split("\t")) for line in lines]


# Independent twins


def value_of(text: str, median=statistics.median) -> int:
    """By the brackets alone, not the parentheses."""
    stack = [[]]
    for word in text.replace("(", " ").replace(")", " ").split():
        if word.startswith("["):
            stack.append([word])
        elif word == "]":
            operator, *values = stack.pop()
            operation = {"[MIN": min, "[MAX": max, "[MED": median, "[SM": lambda v: sum(v) % 10}[operator]
            stack[-1].append(int(operation(values)))
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value


def spans_of(words: list[str], start: int = 0) -> tuple[int, list[tuple[int, int]]]:
    """By the parentheses alone: the end of the tree at the head of `words` (consumed), and all its nodes."""
    word = words.pop(0)
    if word != "(":
        return (start + 2, [(start, start + 2)]) if word.startswith("[") else (start + 1, [])
    middle, left = spans_of(words, start)
    end, right = spans_of(words, middle)
    assert words.pop(0) == ")"
    return end, [*left, *right, (start, end)]


SAMPLE = [text for _, text in generate(300, seed=11)]


# Tokens


def test_vocabulary_is_fixed():
    assert " ".join(VOCABULARY) == "<pad> [ ] MIN MAX MED SM 0 1 2 3 4 5 6 7 8 9"
    assert PADDING == 0


def test_brackets_are_split_from_operators_and_parentheses_dropped():
    ids = encode("( ( ( [SM 0 ) ( ( ( [MIN 7 ) 8 ) ] ) ) ] )")
    assert [VOCABULARY[i] for i in ids] == ["[", "SM", "0", "[", "MIN", "7", "8", "]", "]"]
    assert encode("[SM 0 [MIN 7 8 ] ]") == ids
    assert decode([*ids, 0, 0]) == "[SM 0 [MIN 7 8 ] ]"
    with pytest.raises(GappedError, match=r"unknown token 'MAX', expected one of \( \) \[MIN \[MAX"):
        encode("( MAX 1 )")
    with pytest.raises(GappedError, match="got 17, expected token ids from 0 to 16"):
        decode([17])


def test_tokens_of_the_parser_are_those_of_the_tokeniser():
    for text in SAMPLE:
        assert list(parse(text).tokens) == encode(text)
        assert len(encode(text)) == count_tokens(text)


# Expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("( ( ( [MIN 4 ) 2 ) ] )", 2),
        ("( ( ( ( ( ( [MAX 4 ) 2 ) 9 ) 1 ) 0 ) ] )", 9),
        ("( ( ( ( [SM 9 ) 8 ) 7 ) ] )", 4),
        ("( ( ( ( [MED 9 ) 1 ) 3 ) ] )", 3),
        ("( ( ( [MED 8 ) 1 ) ] )", 4),
        ("( ( ( ( ( [MED 9 ) 4 ) 0 ) 5 ) ] )", 4),
        ("( ( ( [SM ( ( ( [MAX 1 ) 6 ) ] ) ) ( ( ( [MIN 5 ) 8 ) ] ) ) ] )", 1),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


def test_spans_by_hand():
    # [SM 0 [MIN 7 8 ] ] : tokens [ SM 0 [ MIN 7 8 ] ]
    expression = parse("( ( ( [SM 0 ) ( ( ( [MIN 7 ) 8 ) ] ) ) ] )")
    assert expression.spans == ((0, 2), (0, 3), (3, 5), (3, 6), (3, 7), (3, 8), (0, 8), (0, 9))
    assert parse("3").spans == ()


def test_trees_and_values_of_generated_expressions():
    assert max(map(count_tokens, SAMPLE)) > 100
    for text in SAMPLE:
        expression = parse(text)
        assert expression.value == value_of(text)
        assert list(expression.spans) == spans_of(text.split())[1]
        assert len(expression.spans) == len(expression.tokens) - 1


def test_a_deep_tree_needs_no_recursion():
    depth = 20_000
    text = "( ( ( [SM 1 ) " * depth + "1" + " ) ] )" * depth
    assert evaluate(text) == (depth + 1) % 10


MALFORMED = [
    ("9 ( ( ( [MAX 2 ) 9 ) ] )", "no tab"),
    ("", "no tab"),
    ("\t( ( ( [MAX 2 ) 9 ) ] )", "label '', expected a digit"),
    ("10\t( ( ( [MAX 2 ) 9 ) ] )", "label '10', expected a digit"),
    ("x\t9", "label 'x', expected a digit"),
    ("²\t9", r"label '\\\\xc2\\\\xb2', expected a digit"),
    ("8\t( ( ( [MAX 2 ) 9 ) ] )", "label 8, but the expression has the value 9"),
    ("9\t( ( ( [MAX 2 ) 9 ) ]", "unbalanced parentheses: one is opened"),
    ("9\t( ( ( [MAX 2 ) 9 ) ] ) )", "unbalanced parentheses: one is closed"),
    ("9\t) 9", "unbalanced parentheses: one is closed"),
    ("9\t( ( ( [MAX 2 ) 12 ) ] )", "unknown token '12'"),
    ("9\t( ( ( [AVG 2 ) 9 ) ] )", r"unknown token '\[AVG'"),
    ("9\t( ( ( [ MAX 2 ) 9 ) ] )", r"unknown token '\['"),
    ("9\t( ( ( [MAX é ) 9 ) ] )", "unknown token"),
    ("9\t" + "x" * 10_000, r"unknown token 'x{20}\.\.\.'"),
    ("9\t( ( [MAX 9 ) ] )", r"MAX with 1 argument\(s\), expected 2 to 5"),
    ("9\t( [MAX ] )", r"MAX with 0 argument\(s\)"),
    ("9\t( ( ( ( ( ( ( [MAX 1 ) 2 ) 3 ) 4 ) 5 ) 9 ) ] )", r"MAX with 6 argument\(s\)"),
    ("9\t( ( [MAX 2 9 ) ] )", r"parentheses around 3 part\(s\), expected 2"),
    ("9\t( 9 )", r"parentheses around 1 part\(s\)"),
    ("9\t( )", r"parentheses around 0 part\(s\)"),
    ("9\t( ( [MAX 2 ) 9 )", "MAX without a closing bracket"),
    ("9\t( ( ( [MAX 2 ) [MIN ) ] )", "MIN is used as an argument before"),
    ("9\t( 2 9 )", "2 stands where an operator is expected"),
    ("9\t( ] 9 )", "] stands where an operator is expected"),
    ("9\t9 9", "2 expressions, expected 1"),
    ("9\t", "0 expressions, expected 1"),
    ("9\t]", "a closing bracket without an operator"),
]


@pytest.mark.parametrize(("line", "words"), MALFORMED)
def test_a_malformed_line_is_named(line, words):
    content = f"9\t( ( ( [MAX 2 ) 9 ) ] )\n{line}\n9\t9\n".encode()
    with pytest.raises(GappedError, match=rf"^some/file\.tsv, line 2: .*{words}") as caught:
        list(examples(content, Path("some/file.tsv")))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_file_may_lack_its_last_newline():
    assert [each.value for each in examples(b"1\t1\n2\t2", Path("f"))] == [1, 2]
    assert list(examples(b"", Path("f"))) == []


# The official files


@needs_official
@pytest.mark.parametrize("name", FILES)
def test_every_official_label_and_tree_agrees(name):
    rows = official_rows(name)
    parsed = list(examples(listops_files.read(FILES[name]), FILES[name]))
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
    rows = official_rows(VALID.name)
    assert sum(value_of(text, median) != int(label) for label, text in rows) > 50


@needs_official
def test_official_splits_are_used_where_present(tmp_path):
    got = load(REAL, progress=False, count=500)
    assert (got.train.official, got.valid.official, got.test.official) == (False, True, True)
    assert (got.train.complete, got.valid.complete, got.test.complete) == (500, 1_000, 10_000)
    assert (len(got.valid), len(got.test)) == (857, 8_689)
    assert [path.name.split("-")[1] for path in cached(tmp_path)] == ["train"]
    labels = [int(label) for label, text in official_rows(TEST.name) if len(encode(text)) < 100]
    assert got.test.labels.tolist() == labels
    held_out = {text for name in FILES for _, text in official_rows(name)}
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

    monkeypatch.setattr("gapped.lab.data.listops.generator._OPERATOR_SHARE", operators)
    theirs, n = share([count_tokens(text) for _, text in official_rows(TEST.name)])
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
    started = time.perf_counter()
    rows = generate(90_000, exclude={text for name in FILES for _, text in official_rows(name)})
    assert time.perf_counter() - started < 30
    ours = [count_tokens(text) for _, text in rows]
    theirs = [count_tokens(text) for _, text in official_rows(TEST.name)]
    assert len({text for _, text in rows}) == 90_000
    assert statistics.median(theirs) == 19
    assert abs(statistics.median(ours) - 19) <= 1
    assert statistics.mean(theirs) == pytest.approx(52.06, abs=0.01)
    assert statistics.mean(ours) == pytest.approx(statistics.mean(theirs), abs=3)
    under = [statistics.mean(n < 100 for n in lengths) for lengths in (ours, theirs)]
    assert under[1] == pytest.approx(0.8689, abs=1e-4)
    assert under[0] == pytest.approx(under[1], abs=0.01)
    got = load(REAL, progress=False)
    assert got.train.complete == 90_000
    assert len(got.train) == sum(n < 100 for n in ours)


# Generating


def replay(*numbers: float):
    return iter(numbers).__next__


def test_draw_by_replay():
    # A number below 0.25 makes an operator; then come the arguments and, last, which operator.
    assert draw(replay(0.25, 0.99)) == ("9", 9)
    two_digits = (0.9, 0.31, 0.9, 0.72)
    assert draw(replay(0.249, 0.0, *two_digits, 0.5)) == ("( ( ( [MED 3 ) 7 ) ] )", 5)
    nested = (0.2, 0.24, *two_digits, 0.74)
    expected = "( ( ( ( [SM ( ( ( [MED 3 ) 7 ) ] ) ) 3 ) 7 ) ] )"
    assert draw(replay(0.1, 0.26, *nested, *two_digits, 0.99)) == (expected, 5)
    for number, count in ((0.0, 2), (0.2499, 2), (0.25, 3), (0.5, 4), (0.75, 5), (0.9999, 5)):
        digits = (0.9, 0.0) * count
        assert draw(replay(0.0, number, *digits, 0.0))[0].count("0") == count


def test_depth_is_bounded():
    """With operators wherever allowed, and two arguments each, the tree is complete."""
    text, _ = draw(lambda: 0.0, depth=MAX_DEPTH - 4)
    assert text.count("[MIN") == 2**4 - 1
    assert text.count("0") == 2**4
    assert draw(lambda: 0.0, depth=MAX_DEPTH) == ("0", 0)


def test_generated_expressions_are_unique_disjoint_and_reproducible():
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    rows = generate(500, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert len({text for _, text in rows}) == 500
    assert generate(500, seed=3) == rows != generate(500, seed=4)
    # Records name the seed alone: the same seed must never mean other expressions.
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert digest == "32deb66a80ab4e2b983543b0b39560d01444212b95fa7b78f8f80297b385cd76"
    first = [text for _, text in rows[:100]]
    again = {text for _, text in generate(500, seed=3, exclude=first)}
    assert len(again) == 500
    assert not again & set(first)


def test_any_part_of_the_set_has_the_law_of_the_whole():
    """In the order of drawing, the ten single digits are all among the first few dozen expressions."""
    places = [place for place, (_, text) in enumerate(generate(2_000, seed=0)) if len(text) == 1]
    assert len(places) == 10
    assert max(places) > 1_000


@pytest.mark.parametrize(
    ("count", "seed", "words"),
    [
        (-1, 0, "count: got -1"),
        (2.5, 0, "count: got 2.5"),
        (True, 0, "count"),
        (1, -1, "seed: got -1"),
        (1, "0", "seed"),
    ],
)
def test_generate_rejects(count, seed, words):
    with pytest.raises(GappedError, match=words):
        generate(count, seed)


def test_generate_nothing():
    assert generate(0) == []


# Tensors


def test_stack_pads():
    split = stack(
        map(parse, ["7", "( ( ( [SM 0 ) ( ( ( [MIN 7 ) 8 ) ] ) ) ] )", "( ( ( [MED 4 ) 7 ) ] )"]), True, 5
    )
    assert split.tokens.dtype == torch.uint8
    assert split.tokens.tolist() == [
        [14, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 6, 7, 1, 3, 14, 15, 2, 2],
        [1, 5, 11, 14, 2, 0, 0, 0, 0],
    ]
    assert split.lengths.tolist() == [1, 9, 5]
    assert split.labels.tolist() == [7, 7, 5]
    assert split.lengths.dtype == split.labels.dtype == torch.int64
    assert split.spans.shape == (3, 8, 2)
    assert split.spans.dtype == torch.int16
    assert split.spans[0].count_nonzero() == 0
    assert split.spans[2].tolist() == [[0, 2], [0, 3], [0, 4], [0, 5], *[[0, 0]] * 4]
    assert (len(split), split.official, split.complete) == (3, True, 5)


@pytest.mark.parametrize(("texts", "shape"), [([], (0, 0)), (["1", "2"], (2, 1))])
def test_stack_of_nothing_and_of_digits(texts, shape):
    split = stack(map(parse, texts), False, len(texts))
    assert split.tokens.shape == shape
    assert split.spans.shape == (shape[0], 0, 2)


# The source


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
    SMALL.load(None, progress=False, download=False)
    path = next(path for path in cached(tmp_path) if "test" in path.name)
    with pytest.raises(GappedError, match=r"line 1: no tab"):
        list(examples(path.read_bytes(), path))
    path.rename(path.with_name(TEST.name))
    with pytest.raises(GappedError, match=r"test_d20s\.tsv, line 1: no tab"):
        SMALL.load(None, progress=False, download=False)


def test_the_cache_is_read_not_made_again(tmp_path, monkeypatch):
    first = SMALL.load(None, progress=False, download=False)
    monkeypatch.setattr("gapped.lab.data.listops.source.generate", None)
    again = SMALL.load(None, progress=False, download=False)
    for one, two in ((first.train, again.train), (first.valid, again.valid), (first.test, again.test)):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.spans, two.spans)
        assert torch.equal(one.labels, two.labels)
    # The bound on the length is not part of what is cached, count and seed are.
    shorter = replace(SMALL, max_tokens=10).load(None, progress=False, download=False)
    assert 0 < len(shorter.train) < len(again.train)
    for other in (replace(SMALL, seed=1), replace(SMALL, count=301)):
        with pytest.raises(TypeError):
            other.load(None, progress=False, download=False)


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
    first = SMALL.load(None, progress=False, download=False)
    contents = {path: path.read_bytes() for path in cached(tmp_path)}
    path = next(path for path in contents if "valid" in path.name)
    damage(path)
    assert path.read_bytes() != contents[path]
    with pytest.warns(UserWarning, match=rf"^{path}: damaged.*; it is generated anew$") as caught:
        again = SMALL.load(None, progress=False, download=False)
    assert len(caught) == 1
    assert torch.equal(again.valid.tokens, first.valid.tokens)
    assert {path: path.read_bytes() for path in cached(tmp_path)} == contents
    SMALL.load(None, progress=False, download=False)


def test_an_interrupted_generation_leaves_whole_files(tmp_path, monkeypatch):
    write = listops_files.write_generated

    def stop_at_the_second(path, rows, recipe):
        if "train" not in path.name:
            raise KeyboardInterrupt
        write(path, rows, recipe)

    with monkeypatch.context() as patched:
        patched.setattr(listops_files, "write_generated", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            SMALL.load(None, progress=False, download=False)
    (train,) = cached(tmp_path)
    content = train.read_bytes()
    SMALL.load(None, progress=False, download=False)
    assert len(cached(tmp_path)) == 3
    assert train.read_bytes() == content


@pytest.mark.parametrize("method", ["load", "fetch"])
def test_generated_labels_are_checked_too(monkeypatch, method):
    wrong = [((label + 1) % 10, text) for label, text in generate(400)]
    monkeypatch.setattr("gapped.lab.data.listops.source.generate", lambda *_, **__: list(wrong))
    with pytest.raises(GappedError, match=r"generated-train-\w+\.tsv, line 2: label"):
        getattr(SMALL, method)(None, progress=False, download=False)


def test_unwritable_cache(tmp_path):
    (tmp_path / "xdg").write_text("in the way")
    with pytest.raises(GappedError, match=r"cannot write .*generated-train.*XDG_CACHE_HOME"):
        SMALL.load(None, progress=False, download=False)


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
    got = source.load(tmp_path / "sets", progress=False, download=False)
    assert (got.train.official, got.valid.official, got.test.official) == (False, False, True)
    held_out = {line.split("\t")[1] for line in path.read_text().splitlines()}
    texts = [line.split("\t")[1] for made in cached(tmp_path) for line in made.read_text().splitlines()[1:]]
    assert len(texts) == len(set(texts)) == 340
    assert not held_out & set(texts)
    # Without the file, the same seed does draw its expressions.
    SMALL.load(None, progress=False, download=False)
    everything = "".join(made.read_text() for made in cached(tmp_path))
    assert sum(f"\t{text}\n" in everything for text in held_out) > 30


def test_a_packed_official_file(tmp_path, with_test_file):
    source, path = with_test_file
    plain = source.load(tmp_path / "sets", progress=False, download=False)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    packed = source.load(tmp_path / "sets", progress=False, download=False)
    assert packed.test.official
    assert torch.equal(packed.test.tokens, plain.test.tokens)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(b"9\t9\n" * 100)[:-9])
    with pytest.raises(GappedError, match=r"test_d20s\.tsv\.gz: damaged gzip file"):
        source.load(tmp_path / "sets", progress=False, download=False)


def test_a_wrong_official_file(tmp_path, with_test_file):
    source, path = with_test_file
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(GappedError, match=rf"^{path}: sha256 .* \(not the published file\)"):
        source.load(tmp_path / "sets", progress=False, download=False)
    path.write_text("".join([*lines[:7], lines[7].replace("\t", " "), *lines[8:]]))
    with pytest.raises(GappedError, match=rf"^{path}, line 8: no tab"):
        source.fetch(tmp_path / "sets", progress=False, download=False)


def test_only_expressions_under_the_bound_are_kept(tmp_path, with_test_file):
    source, path = with_test_file
    lengths = [count_tokens(line) for line in path.read_text().splitlines()]
    bound = next(n for n in sorted(lengths) if n > 8)
    got = replace(source, max_tokens=bound).load(tmp_path / "sets", progress=False, download=False)
    assert got.test.lengths.tolist() == [n for n in lengths if n < bound]
    assert bound in lengths
    assert got.test.tokens.shape[1] == max(n for n in lengths if n < bound)
    assert got.max_tokens == bound


@pytest.mark.parametrize("how", [{"max_tokens": 1}, {"max_tokens": 40_000}, {"count": 0}])
def test_source_rejects(how):
    with pytest.raises(GappedError, match=next(iter(how))):
        load(progress=False, **how)


def test_locate_reads_nothing_and_fetch_verifies(tmp_path, with_test_file):
    source, path = with_test_file
    sets = tmp_path / "sets"
    before = [(part.name, part.place) for part in source.locate(sets)]
    assert before == [("train (to be generated)", None), ("valid (to be generated)", None), (TEST.name, path)]
    assert not (tmp_path / "xdg").exists()
    parts = source.fetch(sets, progress=False, download=False)
    assert [part.name for part in parts] == ["train (generated)", "valid (generated)", TEST.name]
    assert {part.checked for part in parts} == {"sha256, labels"}
    assert [part.place for part in source.locate(sets)] == [part.place for part in parts]
    assert sorted(part.place for part in parts[:2]) == cached(tmp_path)


def test_the_command(tmp_path, monkeypatch):
    assert data.SOURCES["listops"] is LISTOPS
    assert "listops" not in data.IMAGES
    monkeypatch.setattr(data, "SOURCES", {"listops": SMALL})
    app = typer.Typer()
    app.command()(data_command)
    listed = CliRunner().invoke(app, [], catch_exceptions=False).output
    assert listed.startswith("listops\t90,000 + 1,000 + 10,000 ")
    assert listed.endswith(
        "\tmissing: train (to be generated), valid (to be generated), test (to be generated)\n"
    )
    lines = CliRunner().invoke(app, ["listops"], catch_exceptions=False).output.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [
        [f"{split} (generated)", "sha256, labels"] for split in ("train", "valid", "test")
    ]
    assert sorted(Path(line.split("\t")[2]) for line in lines) == cached(tmp_path)
    listed = CliRunner().invoke(app, [], catch_exceptions=False).output
    assert listed.endswith(f"\t{tmp_path / 'xdg' / 'gapped' / 'listops'}\n")


# Buckets


def padding(lengths: list[int]) -> int:
    return sum(max(lengths) - n for n in lengths)


def fewest_groups(lengths: list[int], waste: float) -> tuple[int, int]:
    """Groups and padding of the best division, by trying all."""
    distinct = sorted(set(lengths))
    found = []
    for marks in itertools.product([False, True], repeat=len(distinct) - 1):
        groups = [[distinct[0]]]
        for value, new in zip(distinct[1:], marks, strict=True):
            groups.append([value]) if new else groups[-1].append(value)
        filled = [[n for n in lengths if n in group] for group in groups]
        if all(padding(group) <= waste * len(group) * max(group) for group in filled):
            found.append((len(filled), sum(map(padding, filled))))
    return min(found)


@pytest.mark.parametrize("waste", [0, 0.02, 0.1, 0.3, 0.9])
def test_buckets_are_the_best_division(waste):
    rng = random.Random(int(100 * waste))
    for _ in range(20):
        lengths = [rng.randint(1, 10) for _ in range(rng.randint(1, 40))]
        groups = buckets(torch.tensor(lengths), waste)
        assert sorted(torch.cat(groups).tolist()) == list(range(len(lengths)))
        filled = [[lengths[i] for i in group.tolist()] for group in groups]
        assert (len(groups), sum(map(padding, filled))) == fewest_groups(lengths, waste)
        assert all(padding(group) <= waste * len(group) * max(group) for group in filled)
        assert all(max(one) < min(two) for one, two in itertools.pairwise(filled))
        assert all(group.tolist() == sorted(group.tolist()) for group in groups)
        assert all(group.dtype == torch.int64 for group in groups)


def test_buckets_of_a_split():
    lengths = torch.tensor([n for text in SAMPLE if (n := count_tokens(text)) < 100])
    assert len(buckets(lengths, 0.0)) == len(lengths.unique())
    assert 1 < len(buckets(lengths, 0.3)) < len(buckets(lengths, 0.1)) < len(lengths.unique())
    assert len(buckets(lengths, 0.99)) == 1


def test_buckets_of_nothing_and_of_bytes():
    assert buckets(torch.zeros(0, dtype=torch.int64)) == []
    assert [group.tolist() for group in buckets(torch.tensor([3, 200], dtype=torch.uint8))] == [[0], [1]]


@pytest.mark.parametrize(
    ("lengths", "waste", "words"),
    [
        (torch.ones(3), 0.1, "lengths: got torch.float32"),
        (torch.ones(3, 1, dtype=torch.int64), 0.1, r"shape \(3, 1\)"),
        (torch.tensor([2, 0]), 0.1, "lengths: got 0, expected lengths of at least 1"),
        (torch.tensor([2]), 1.0, "waste: got 1.0"),
        (torch.tensor([2]), -0.1, "waste"),
        (torch.tensor([2]), float("nan"), "waste"),
    ],
)
def test_buckets_reject(lengths, waste, words):
    with pytest.raises(GappedError, match=words):
        buckets(lengths, waste)
