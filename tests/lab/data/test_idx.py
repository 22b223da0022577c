"""Image sets of idx files: loading, verification. Nothing here reaches the network."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys

import pytest
import torch
from tiny_images import REAL_DATA, TINY_CONTENTS, TINY_IMAGES, put_tiny_images

from gapped.errors import GappedError
from gapped_lab import data
from gapped_lab.data.images import FASHION_MNIST, MNIST

pytestmark = pytest.mark.usefixtures("no_data")


TRAIN = TINY_CONTENTS["train-idx"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_load_plain_or_packed_nested_or_flat(tmp_path, packed, nested):
    put_tiny_images(tmp_path / "tiny" if nested else tmp_path, packed)
    got = TINY_IMAGES.load(tmp_path, progress=False, download=False)
    assert got.train.shape == (6, 8)
    assert got.test.shape == (3, 8)
    assert (got.height, got.width, got.scale, got.name) == (2, 4, 255, "tiny")
    assert got.train.dtype == got.test.dtype == torch.uint8
    assert got.train_labels.dtype == got.test_labels.dtype == torch.int64
    assert bytes(got.train.flatten().tolist()) == TINY_CONTENTS["train-idx"][16:]
    assert got.test_labels.tolist() == list(TINY_CONTENTS["test_labels-idx"][8:])


def test_fetch_says_what_was_verified(tmp_path):
    put_tiny_images(tmp_path)
    resources = TINY_IMAGES.fetch(tmp_path, progress=False, download=False)
    assert {each.verification for each in resources} == {"sha256"}
    assert [each.place for each in resources] == [tmp_path / name for name in TINY_CONTENTS]
    assert {each.verification for each in TINY_IMAGES.locate(tmp_path)} == {""}


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train-idx", flipped(TRAIN), "sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"),
        ("train-idx", TRAIN[:-5], "59 bytes of sha256"),
        ("train-idx", TINY_CONTENTS["test-idx"], "damaged, or another data set"),
        ("train-idx", b"not found", "9 bytes of sha256"),
        ("train-idx", gzip.compress(TRAIN, mtime=0)[:-9], "damaged gzip file"),
        ("train-idx", flipped(gzip.compress(TRAIN, mtime=0)), "damaged gzip file"),
        ("train-idx", b"\x1f\x8b" + b"?" * 40, "damaged gzip file"),
    ],
    ids=["flipped", "short", "other", "text", "short-gzip", "flipped-gzip", "no-gzip"],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, file, content, words):
    put_tiny_images(tmp_path)
    (tmp_path / file).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(GappedError, match=words) as caught:
        TINY_IMAGES.load(tmp_path, progress=False, download=True)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / file))
    assert "gapped data tiny" in message
    assert "\n" not in message
    assert sorted(tmp_path.rglob("*")) == before


def test_digits_split_is_fixed_and_a_partition():
    from sklearn.datasets import load_digits

    torch.manual_seed(5)
    state = torch.get_rng_state()
    digits, again = data.load("digits", download=False), data.load("digits")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(digits.train, again.train)
    assert torch.equal(digits.test_labels, again.test_labels)
    assert digits.train.shape == (1500, 64)
    assert digits.test.shape == (297, 64)
    assert (digits.height, digits.width, digits.scale) == (8, 8, 16)
    assert digits.train.dtype == torch.uint8
    assert digits.train_labels.dtype == torch.int64
    assert int(digits.train.max()) == int(digits.test.max()) == 16
    assert set(digits.test_labels.tolist()) == set(range(10))
    whole = load_digits()
    rows = torch.cat([digits.train, digits.test]).long().tolist()
    labels = torch.cat([digits.train_labels, digits.test_labels]).tolist()
    assert sorted(zip(rows, labels, strict=True)) == sorted(
        zip(whole.data.astype(int).tolist(), whole.target.tolist(), strict=True)
    )
    # The split is part of every published number on digits: a change of it must not go unnoticed.
    digest = hashlib.sha256(bytes(digits.test.flatten().tolist())).hexdigest()
    assert digest == "d06c82c1ea9df0379c6339bdcc1c6b1cf2463d5f3bcf653f6eceef285e0a4c66"


def needs_real(source):
    """Only the named folder counts: tests hide what else the machine has."""
    absent = not any((REAL_DATA / source.name).glob("train-images*"))
    return pytest.mark.skipif(absent, reason=f"no {source.name} in $GAPPED_DATA or ../shared/data")


@needs_real(MNIST)
def test_real_mnist_is_not_taken_for_fashion_mnist():
    mnist = data.load("mnist", REAL_DATA, download=False)
    assert mnist.train.shape == (60_000, 784)
    assert mnist.test.shape == (10_000, 784)
    assert (mnist.height, mnist.width, mnist.scale) == (28, 28, 255)
    # The published class counts of the test set, and the label of the first training image.
    assert mnist.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert int(mnist.train_labels[0]) == 5
    assert float(mnist.train.double().mean() / 255) == pytest.approx(0.1307, abs=1e-4)
    with pytest.raises(GappedError, match=r"damaged, or another data set\); .* gapped data fashion-mnist"):
        FASHION_MNIST.load(REAL_DATA / "mnist", progress=False, download=False)


def test_import_is_light():
    code = "import sys, gapped_lab.data; assert not {'sklearn', 'pooch', 'requests'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
