"""Data sets: parsing, lookup, verification, download. Nothing here reaches the network."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pooch
import pytest
import torch

from gapped.errors import GappedError
from gapped.lab import data
from gapped.lab.data import folders, idx
from gapped.lab.data.download import _bar
from gapped.lab.data.idxsource import IdxFile, IdxSource
from gapped.lab.data.mnist import FASHION_MNIST, MNIST

MIRROR = "https://mirror.invalid/tiny/"
SECOND = "https://second.invalid/tiny/"


def encode(values: torch.Tensor) -> bytes:
    """An idx file, written independently of the parser."""
    header = struct.pack(">HBB", 0, 8, values.dim()) + b"".join(struct.pack(">I", n) for n in values.shape)
    return header + bytes(values.flatten().tolist())


def _tiny() -> tuple[IdxSource, dict[str, bytes]]:
    """A set of 6 + 3 images of 2x4, and the unpacked content of its files."""
    g = torch.Generator().manual_seed(1)
    shapes = {"train": (6, 2, 4), "train_labels": (6,), "test": (3, 2, 4), "test_labels": (3,)}
    files, contents = {}, {}
    for role, shape in shapes.items():
        raw = encode(torch.randint(0, 10, shape, generator=g, dtype=torch.uint8))
        packed = gzip.compress(raw, mtime=0)
        name = f"{role}-idx"
        contents[name] = raw
        files[role] = IdxFile(
            name, shape, hashlib.md5(packed).hexdigest(), sha256=hashlib.sha256(raw).hexdigest()
        )
    return IdxSource("tiny", "for tests", (MIRROR, SECOND), **files), contents


TINY, CONTENTS = _tiny()


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """No data of the machine's user, and no way out of the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GAPPED_DATA", raising=False)

    def refuse(self, url, output_file, pooch):
        raise ConnectionError(f"a test tried to reach {url}")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)


def put(folder: Path, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in CONTENTS.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw) if packed else raw)


def everything_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# idx


@pytest.mark.parametrize("shape", [(5,), (3, 2), (4, 2, 3), (0, 28, 28), (1, 1, 1, 1)])
def test_idx_round_trip(shape):
    g = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    parsed = idx.parse(encode(values))
    assert parsed.dtype == torch.uint8
    assert torch.equal(parsed, values)


GOOD = encode(torch.arange(6, dtype=torch.uint8).reshape(3, 2))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (GOOD[:3], "truncated: 3 bytes"),
        (GOOD[:7], r"truncated: 7 bytes, the header of 2 axes alone has 12"),
        (GOOD[:-1], r"truncated: 17 bytes, the header \(3 x 2\) announces 18"),
        (GOOD + b"\0", r"too long: 19 bytes, .* announces 18"),
        (b"<html>offline</html>", "not an idx file: it starts with 3c 68 74 6d"),
        (b"\0\1" + GOOD[2:], "not an idx file"),
        (b"\0\0\x07\2" + GOOD[4:], "not an idx file"),
        (b"\0\0\x0d\2" + GOOD[4:], r"type float32 \(0x0d\), expected uint8"),
        (b"\0\0\x08\0", "without axes"),
        (b"\0\0\x08\3" + b"\xff" * 12, "truncated: 16 bytes"),
    ],
)
def test_idx_rejects(raw, words):
    with pytest.raises(GappedError, match=words):
        idx.parse(raw)


# Loading and verifying


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_load_plain_or_packed_nested_or_flat(tmp_path, packed, nested):
    put(tmp_path / "tiny" if nested else tmp_path, packed)
    got = TINY.load(tmp_path, progress=False, download=False)
    assert got.train.shape == (6, 8)
    assert got.test.shape == (3, 8)
    assert (got.height, got.width, got.scale, got.name) == (2, 4, 255, "tiny")
    assert got.train.dtype == got.test.dtype == torch.uint8
    assert got.train_labels.dtype == got.test_labels.dtype == torch.int64
    assert bytes(got.train.flatten().tolist()) == CONTENTS["train-idx"][16:]
    assert got.test_labels.tolist() == list(CONTENTS["test_labels-idx"][8:])


def test_plain_content_under_a_gz_name(tmp_path):
    put(tmp_path)
    (tmp_path / "train-idx").rename(tmp_path / "train-idx.gz")
    assert TINY.load(tmp_path, progress=False, download=False).train.shape == (6, 8)


def test_fetch_says_what_was_verified(tmp_path):
    put(tmp_path)
    parts = TINY.fetch(tmp_path, progress=False, download=False)
    assert {part.checked for part in parts} == {"sha256"}
    assert [part.place for part in parts] == [tmp_path / name for name in CONTENTS]
    assert {part.checked for part in TINY.locate(tmp_path)} == {""}


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


TRAIN, LABELS = CONTENTS["train-idx"], CONTENTS["train_labels-idx"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train-idx", flipped(TRAIN), "sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"),
        ("train-idx", TRAIN[:-5], "truncated: 59 bytes"),
        ("train-idx", CONTENTS["test-idx"], r"shape \(3, 2, 4\), expected \(6, 2, 4\)"),
        ("train-idx", b"not found", "not an idx file"),
        ("train-idx", gzip.compress(TRAIN, mtime=0)[:-9], "damaged gzip file"),
        ("train-idx", flipped(gzip.compress(TRAIN, mtime=0)), "damaged gzip file"),
        ("train-idx", b"\x1f\x8b" + b"?" * 40, "damaged gzip file"),
        ("train_labels-idx", LABELS[:-1] + b"\x0a", "label 10, expected 0 to 9"),
    ],
    ids=["flipped", "short", "other", "text", "short-gzip", "flipped-gzip", "no-gzip", "label"],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, file, content, words):
    put(tmp_path)
    (tmp_path / file).write_bytes(content)
    before = sorted(everything_under(tmp_path))
    with pytest.raises(GappedError, match=words) as caught:
        TINY.load(tmp_path, progress=False, download=True)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / file))
    assert "gapped data tiny" in message
    assert "\n" not in message
    assert sorted(everything_under(tmp_path)) == before


def test_unreadable_file(tmp_path, monkeypatch):
    put(tmp_path)

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(GappedError, match=r"train-idx: cannot be read \(Permission denied\)"):
        TINY.load(tmp_path, progress=False, download=False)


def without_sha256(source: IdxSource, **changes: str) -> IdxSource:
    roles = {role: replace(getattr(source, role), sha256=None) for role in ("train", "test")}
    return replace(source, **{role: replace(file, **changes) for role, file in roles.items()})


def test_without_a_pinned_content_the_form_is_checked(tmp_path):
    source = without_sha256(TINY)
    put(tmp_path)
    (tmp_path / "train-idx").write_bytes(flipped(TRAIN))
    (tmp_path / "test-idx").write_bytes(gzip.compress(CONTENTS["test-idx"], mtime=0))
    parts = source.fetch(tmp_path, progress=False, download=False)
    assert [part.checked for part in parts] == ["form only", "sha256", "publisher's md5", "sha256"]


def test_the_twin_set_is_refused(tmp_path):
    source = without_sha256(TINY, twin=TINY.train.sha256)
    put(tmp_path)
    with pytest.raises(GappedError, match="another data set, not tiny"):
        source.load(tmp_path, progress=False, download=False)


# Lookup


def test_lookup_order(tmp_path, monkeypatch):
    argument, variable = tmp_path / "argument", tmp_path / "variable"
    monkeypatch.setenv("GAPPED_DATA", str(variable))
    cached = folders.cache()
    assert cached == tmp_path / "xdg" / "gapped"
    assert folders.find("tiny", "train-idx", argument) is None
    put(cached / "tiny")
    assert folders.find("tiny", "train-idx", argument) == cached / "tiny" / "train-idx"
    put(variable / "tiny", packed=True)
    assert folders.find("tiny", "train-idx", argument) == variable / "tiny" / "train-idx.gz"
    put(argument)
    assert folders.find("tiny", "train-idx", argument) == argument / "train-idx"
    put(argument / "tiny")
    assert folders.find("tiny", "train-idx", argument) == argument / "tiny" / "train-idx"
    assert folders.find("tiny", "train-idx", None) == variable / "tiny" / "train-idx.gz"


def test_cache_and_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert folders.cache() == tmp_path / ".cache" / "gapped"
    monkeypatch.setenv("GAPPED_DATA", "~/sets")
    assert folders.roots(Path("~/here"))[:2] == [tmp_path / "here", tmp_path / "sets"]
    monkeypatch.setenv("GAPPED_DATA", "")
    assert folders.roots(None) == [folders.cache()]


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GappedError, match="a file, expected a folder"):
        TINY.load(tmp_path / "file", progress=False, download=False)


def test_unknown_name_lists_the_known():
    with pytest.raises(GappedError, match=r"got 'minst', expected one of digits, mnist, fashion-mnist"):
        data.load("minst")
    with pytest.raises(GappedError, match="fashion-mnist"):
        data.source("minst")


# Download


def serve(monkeypatch, answers):
    """Let pooch run, and stand in for the server alone: `answers` maps a URL to bytes or raises."""
    asked = []

    def answer(self, url, output_file, pooch):
        asked.append(url)
        Path(output_file).write_bytes(answers(url))

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", answer)
    return asked


def packed(url: str) -> bytes:
    return gzip.compress(CONTENTS[url.rsplit("/", 1)[-1].removesuffix(".gz")], mtime=0)


def test_download_fills_the_cache_once(tmp_path, monkeypatch):
    asked = serve(monkeypatch, packed)
    first = TINY.load(None, progress=True, download=True)
    assert asked == [f"{MIRROR}{name}.gz" for name in CONTENTS]
    home = tmp_path / "xdg" / "gapped" / "tiny"
    assert sorted(everything_under(tmp_path)) == sorted(home / f"{name}.gz" for name in CONTENTS)
    assert torch.equal(TINY.load(None, progress=True, download=False).train, first.train)
    assert len(asked) == 4


def test_download_goes_to_the_named_folder_and_fetches_only_what_lacks(tmp_path, monkeypatch):
    put(tmp_path / "sets" / "tiny")
    (tmp_path / "sets" / "tiny" / "test-idx").unlink()
    asked = serve(monkeypatch, packed)
    TINY.load(tmp_path / "sets", progress=False, download=True)
    assert asked == [f"{MIRROR}test-idx.gz"]
    assert (tmp_path / "sets" / "tiny" / "test-idx.gz").is_file()


def test_second_mirror_after_a_damaged_first(tmp_path, monkeypatch):
    serve(monkeypatch, lambda url: packed(url)[:-3] if url.startswith(MIRROR) else packed(url))
    assert TINY.load(None, progress=False, download=True).train.shape == (6, 8)


def test_bad_checksum_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve(monkeypatch, lambda url: flipped(packed(url)))
    words = r"mirror\.invalid: the checksum does not match; second\.invalid: the checksum does not match"
    with pytest.raises(GappedError, match=words):
        TINY.load(None, progress=False, download=True)
    assert everything_under(tmp_path) == []


def test_content_is_verified_before_it_is_stored(tmp_path, monkeypatch):
    """The md5 of the packed file agrees, the sha256 of the content does not."""
    wrong = replace(TINY, train=replace(TINY.train, sha256="0" * 64))
    serve(monkeypatch, packed)
    with pytest.raises(GappedError, match="train-idx was downloaded but is wrong: sha256"):
        wrong.load(None, progress=False, download=True)
    assert everything_under(tmp_path) == []


def test_interrupted_download_goes_on(tmp_path, monkeypatch):
    def stop_at_the_third(url):
        if "/test-idx" in url:
            raise KeyboardInterrupt
        return packed(url)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve(monkeypatch, stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        TINY.load(None, progress=False, download=True)
    assert {path.name for path in everything_under(tmp_path)} == {"train-idx.gz", "train_labels-idx.gz"}
    asked = serve(monkeypatch, packed)
    TINY.load(None, progress=False, download=True)
    assert asked == [f"{MIRROR}test-idx.gz", f"{MIRROR}test_labels-idx.gz"]


def test_offline_says_which_files_go_where(tmp_path):
    with pytest.raises(GappedError, match="could not be downloaded") as caught:
        TINY.load(None, progress=False, download=True)
    message = str(caught.value)
    for words in (*CONTENTS, str(tmp_path / "xdg" / "gapped" / "tiny"), MIRROR, "--data-dir", "$GAPPED_DATA"):
        assert words in message
    assert "mirror.invalid: ConnectionError" in message
    assert "\n" not in message
    assert everything_under(tmp_path) == []


def test_download_off(tmp_path, monkeypatch):
    asked = serve(monkeypatch, packed)
    with pytest.raises(GappedError, match=f"mnist: downloading is off; put .* into {tmp_path}/mnist"):
        data.load("mnist", tmp_path, download=False)
    assert asked == []


def test_without_pooch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(GappedError, match=r'needs pooch: pip install "gapped\[lab\]"; put '):
        TINY.load(None, progress=False, download=True)


def test_unwritable_destination(tmp_path, monkeypatch):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "tiny").write_text("in the way")
    serve(monkeypatch, packed)
    with pytest.raises(GappedError, match=r"cannot write .*train-idx\.gz"):
        TINY.load(tmp_path / "sets", progress=False, download=True)


def test_the_bar_is_true():
    """pooch asks for the truth value, which a tqdm without a total answers with an exception."""
    with _bar("file") as bar:
        assert bool(bar)


def test_http_error_is_told_by_its_status(monkeypatch):
    import requests

    def gone(url):
        response = requests.Response()
        response.status_code = 404
        raise requests.HTTPError("a long story", response=response)

    serve(monkeypatch, gone)
    with pytest.raises(GappedError, match=r"mirror\.invalid: HTTP 404; second"):
        TINY.load(None, progress=False, download=True)


# The real sets


def test_digits():
    digits = data.load("digits", download=False)
    assert digits.train.shape == (1500, 64)
    assert digits.test.shape == (297, 64)
    assert (digits.height, digits.width, digits.scale) == (8, 8, 16)
    assert digits.train.dtype == torch.uint8
    assert digits.train_labels.dtype == torch.int64
    assert int(digits.train.max()) == int(digits.test.max()) == 16
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_digits_split_is_fixed_and_a_partition():
    from sklearn.datasets import load_digits

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again = data.load("digits"), data.load("digits")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.test_labels, again.test_labels)
    whole = load_digits()
    rows = torch.cat([first.train, first.test]).long().tolist()
    labels = torch.cat([first.train_labels, first.test_labels]).tolist()
    assert sorted(zip(rows, labels, strict=True)) == sorted(
        zip(whole.data.astype(int).tolist(), whole.target.tolist(), strict=True)
    )
    # The split is part of every published number on digits: a change of it must not go unnoticed.
    digest = hashlib.sha256(bytes(first.test.flatten().tolist())).hexdigest()
    assert digest == "d06c82c1ea9df0379c6339bdcc1c6b1cf2463d5f3bcf653f6eceef285e0a4c66"


def mnist_folder() -> Path:
    """Where this machine has MNIST, looked up before the tests hide the environment."""
    named = os.environ.get("GAPPED_DATA")
    root = Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data"
    return root.expanduser()


REAL = mnist_folder()
needs_mnist = pytest.mark.skipif(
    any(part.place is None for part in MNIST.locate(REAL)) if REAL.is_dir() else True,
    reason="no MNIST in $GAPPED_DATA or ../shared/data",
)


@needs_mnist
def test_real_mnist():
    mnist = data.load("mnist", REAL, download=False)
    assert mnist.train.shape == (60_000, 784)
    assert mnist.test.shape == (10_000, 784)
    assert (mnist.height, mnist.width, mnist.scale) == (28, 28, 255)
    # The published class counts of the test set, and the label of the first training image.
    assert mnist.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert int(mnist.train_labels[0]) == 5
    assert float(mnist.train.double().mean() / 255) == pytest.approx(0.1307, abs=1e-4)


@needs_mnist
def test_mnist_is_not_taken_for_fashion_mnist():
    with pytest.raises(GappedError, match="another data set, not fashion-mnist"):
        FASHION_MNIST.load(REAL / "mnist", progress=False, download=False)


def test_checksums_are_well_formed_and_mirrors_end_in_a_slash():
    for source in (MNIST, FASHION_MNIST):
        assert all(mirror.endswith("/") for mirror in source.mirrors)
        assert len({file.md5 for file in source.files}) == 4
        for file in source.files:
            assert len(bytes.fromhex(file.md5)) == 16
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
    assert all(file.sha256 for file in MNIST.files)


def test_import_is_light():
    code = "import sys, gapped.lab.data; print(sorted({'sklearn', 'pooch', 'requests'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
