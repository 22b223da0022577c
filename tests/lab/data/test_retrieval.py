"""Where files of data sets are looked up, downloads, `gapped data`. Nothing here reaches the network."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import pooch
import pytest
import torch
from tiny_images import MIRRORS, TINY_CONTENTS, TINY_IMAGES, put_tiny_images
from training_toys import one_line

from gapped.cli.app import main
from gapped.errors import GappedError
from gapped_lab import data, task_kinds
from gapped_lab.data import sources
from gapped_lab.data.images import MNIST

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refuse(self, url, output_file, pooch):
        raise ConnectionError(f"a test tried to reach {url}")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)


def test_lookup_order(tmp_path, monkeypatch):
    argument, variable = tmp_path / "argument", tmp_path / "variable"
    monkeypatch.setenv("GAPPED_DATA", str(variable))
    cached = sources.cache()
    assert cached == tmp_path / "xdg" / "gapped"
    assert sources.find("tiny", "train-idx", argument) is None
    put_tiny_images(sources.SYSTEM / "tiny", packed=True)
    assert sources.find("tiny", "train-idx", argument) == sources.SYSTEM / "tiny" / "train-idx.gz"
    put_tiny_images(cached / "tiny")
    assert sources.find("tiny", "train-idx", argument) == cached / "tiny" / "train-idx"
    put_tiny_images(variable / "tiny", packed=True)
    assert sources.find("tiny", "train-idx", argument) == variable / "tiny" / "train-idx.gz"
    put_tiny_images(argument)
    assert sources.find("tiny", "train-idx", argument) == argument / "train-idx"
    put_tiny_images(argument / "tiny")
    assert sources.find("tiny", "train-idx", argument) == argument / "tiny" / "train-idx"
    assert sources.find("tiny", "train-idx", None) == variable / "tiny" / "train-idx.gz"


def test_cache_and_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert sources.cache() == tmp_path / ".cache" / "gapped"
    monkeypatch.setenv("GAPPED_DATA", "~/sets")
    assert sources.roots(Path("~/here"))[:2] == [tmp_path / "here", tmp_path / "sets"]
    monkeypatch.setenv("GAPPED_DATA", "")
    assert sources.roots(None) == [sources.cache(), sources.SYSTEM]


def test_unknown_name_lists_the_known():
    with pytest.raises(GappedError, match=r"got 'minst', expected one of digits, mnist, fashion-mnist"):
        data.load("minst")
    with pytest.raises(GappedError, match="fashion-mnist"):
        task_kinds.source("minst")


def serve(monkeypatch, answers):
    """Replace the server alone: `answers` maps a URL to bytes or raises. Returns the URLs as they come."""
    urls = []

    def answer(self, url, output_file, pooch):
        urls.append(url)
        Path(output_file).write_bytes(answers(url))

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", answer)
    return urls


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def packed(url: str) -> bytes:
    return gzip.compress(TINY_CONTENTS[url.rsplit("/", 1)[-1].removesuffix(".gz")], mtime=0)


def test_download_fills_the_cache_once(tmp_path, monkeypatch):
    urls = serve(monkeypatch, packed)
    first = TINY_IMAGES.load(None, progress=True, download=True)
    assert urls == [f"{MIRRORS[0]}{name}.gz" for name in TINY_CONTENTS]
    home = tmp_path / "xdg" / "gapped" / "tiny"
    assert sorted(files_under(tmp_path)) == sorted(home / f"{name}.gz" for name in TINY_CONTENTS)
    assert torch.equal(TINY_IMAGES.load(None, progress=True, download=False).train, first.train)
    assert len(urls) == 4


def test_download_goes_to_the_named_folder_and_fetches_only_what_lacks(tmp_path, monkeypatch):
    put_tiny_images(tmp_path / "sets" / "tiny")
    (tmp_path / "sets" / "tiny" / "test-idx").unlink()
    urls = serve(monkeypatch, packed)
    TINY_IMAGES.load(tmp_path / "sets", progress=False, download=True)
    assert urls == [f"{MIRRORS[0]}test-idx.gz"]
    assert (tmp_path / "sets" / "tiny" / "test-idx.gz").is_file()


def test_bad_checksum_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve(monkeypatch, lambda url: packed(url)[:-1] + b"?")
    words = r"mirror\.invalid: the checksum does not match; second\.invalid: the checksum does not match"
    with pytest.raises(GappedError, match=words):
        TINY_IMAGES.load(None, progress=False, download=True)
    assert files_under(tmp_path) == []


def test_interrupted_download_goes_on(tmp_path, monkeypatch):
    def stop_at_the_third(url):
        if "/test-idx" in url:
            raise KeyboardInterrupt
        return packed(url)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve(monkeypatch, stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        TINY_IMAGES.load(None, progress=False, download=True)
    assert {path.name for path in files_under(tmp_path)} == {"train-idx.gz", "train_labels-idx.gz"}
    urls = serve(monkeypatch, packed)
    TINY_IMAGES.load(None, progress=False, download=True)
    assert urls == [f"{MIRRORS[0]}test-idx.gz", f"{MIRRORS[0]}test_labels-idx.gz"]


def test_offline_says_which_files_go_where(tmp_path):
    with pytest.raises(GappedError, match="could not be downloaded") as caught:
        TINY_IMAGES.load(None, progress=False, download=True)
    message = str(caught.value)
    home = str(tmp_path / "xdg" / "gapped" / "tiny")
    for words in (*TINY_CONTENTS, home, MIRRORS[0], "--data-dir", "$GAPPED_DATA"):
        assert words in message
    assert "mirror.invalid: ConnectionError" in message
    assert "\n" not in message
    assert "apt" not in message
    assert files_under(tmp_path) == []


def test_a_set_with_a_package_names_it():
    with pytest.raises(GappedError, match=r"or on Debian and Ubuntu: apt install dataset-fashion-mnist$"):
        data.load("fashion-mnist", progress=False, download=False)


def test_without_pooch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(GappedError, match=r'needs pooch: pip install "gapped\[compare\]"; put '):
        TINY_IMAGES.load(None, progress=False, download=True)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out


def one_file_of_mnist(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / MNIST.files[0].name).write_bytes(b"")
    return folder


def test_list_says_where_and_what_is_missing(tmp_path, capsys):
    folder = one_file_of_mnist(tmp_path / "sets" / "mnist")
    text = printed(capsys, "--data-dir", str(folder.parent))
    lines = [line.split("\t") for line in text.splitlines()]
    assert [line[0] for line in lines] == ["digits", "mnist", "fashion-mnist", "listops"]
    assert lines[0][2] == "inside scikit-learn"
    rest = ", ".join(file.name for file in MNIST.files[1:])
    assert lines[1][2] == f"{folder}; missing: {rest}"
    assert lines[2][2].startswith("missing: train-images-idx3-ubyte, ")


def test_what_must_not_be_downloaded_is_one_line(tmp_path, capsys):
    assert main(["data", "mnist", "--no-download", "--data-dir", str(tmp_path)]) == 2
    assert re.search(rf"mnist: downloading is off; put .* into {tmp_path}/mnist", one_line(capsys))


def test_a_folder_that_does_not_exist_is_said(tmp_path, capsys):
    for arguments in ((), ("digits",)):
        assert main(["data", *arguments, "--data-dir", str(tmp_path / "nowhere")]) == 0
        assert f"--data-dir: {tmp_path / 'nowhere'} does not exist" in one_line(capsys)
