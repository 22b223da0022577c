"""ListOps (Nangia and Bowman 2018): prefix expressions over digits, whose parse tree the model must find.

An example is a line such as ``( ( ( [MAX 2 ) 9 ) ] )`` with the value of the expression, 9, as its label.
The parentheses spell the binary tree; a model sees the tokens ``[ MAX 2 9 ]`` alone.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from gapped.errors import GappedError, reject
from gapped_lab.data import sources
from gapped_lab.data.sources import Resource
from gapped_lab.listops import examples
from gapped_lab.listops.language import RULE, generate

# Ends of spans are 16-bit numbers.
_LIMIT = 2**15


@dataclass(frozen=True)
class OfficialFile:
    """A published split; where it is absent, `count` expressions are generated in its place."""

    name: str
    count: int
    sha256: str


VALID = OfficialFile("valid.tsv", 1_000, "f9e96e70990dfd863e7652fb94c454b3ca9d08a10bf0a775a780ba485452725b")
TEST = OfficialFile(
    "test_d20s.tsv", 10_000, "71335416e6896e8dd8dc69281c8ed9b37316382d05d3705d660461564e843840"
)


@dataclass(frozen=True, eq=False)
class ListOps:
    """Three disjoint splits, of expressions with fewer than `max_tokens` tokens. `seed` drew those splits
    that are not official; the training split never is."""

    name: str
    train: examples.Split
    valid: examples.Split
    test: examples.Split
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class _Files:
    """The files of the splits: official ones that were found, and generated ones, which may not exist yet."""

    official: dict[str, Path]
    generated: dict[str, Path]
    counts: dict[str, int]
    """How many expressions each generated split has."""
    recipe: dict[str, object]
    """All that the generated expressions depend on. Official files are known by their checksums."""

    def read_generated(self) -> dict[str, bytes]:
        return {
            split: examples.read_generated(path, {**self.recipe, "split": split})
            for split, path in self.generated.items()
        }


@dataclass(frozen=True)
class ListOpsSource:
    """`count` training expressions drawn under `seed`; all splits cut to fewer than `max_tokens` tokens.

    Validation and test are the official files where one of the folders that are searched holds them. Missing
    splits are drawn in one go by the rule of the official set and then divided, so that all generated splits
    follow one length law and are disjoint from each other and from the official files. They are kept in the
    user's cache, one file a split, under a name that depends on all of this. Nothing is ever downloaded.
    """

    count: int = 90_000
    seed: int = 0
    max_tokens: int = 100
    valid: OfficialFile = VALID
    test: OfficialFile = TEST
    name: str = "listops"
    summary: str = "90,000 + 1,000 + 10,000 nested list operations; works offline"

    def __post_init__(self) -> None:
        if not 2 <= self.max_tokens <= _LIMIT:
            raise reject("max_tokens", self.max_tokens, f"a whole number from 2 to {_LIMIT}")
        if self.count < 1:
            raise reject("count", self.count, "a whole number from 1")

    @property
    def _official_files(self) -> dict[str, OfficialFile]:
        return {"valid": self.valid, "test": self.test}

    def locate(self, data_dir: Path | None) -> list[Resource]:
        files = self._files(data_dir)
        generated = [
            Resource(f"{split} (generated)", path)
            if path.is_file()
            else Resource(f"{split} (to be generated)", None)
            for split, path in files.generated.items()
        ]
        return generated + [Resource(path.name, path) for path in files.official.values()]

    def check(self, data_dir: Path | None) -> None:
        pass

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Resource]:
        self._contents(self._files(data_dir), progress)
        return [replace(each, verification="sha256") for each in self.locate(data_dir)]

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> ListOps:
        files = self._files(data_dir)
        splits = {
            split: examples.stack(
                examples.expressions(content, self.max_tokens),
                split in files.official,
                content.count(b"\n"),
            )
            for split, content in self._contents(files, progress).items()
        }
        return ListOps(self.name, **splits, seed=self.seed, max_tokens=self.max_tokens)

    def _files(self, data_dir: Path | None) -> _Files:
        official: dict[str, Path] = {}
        counts, checksums = {"train": self.count}, []
        for split, file in self._official_files.items():
            if path := sources.find(self.name, file.name, data_dir):
                official[split] = path
                checksums.append(file.sha256)
            else:
                counts[split] = file.count
        recipe = {"rule": RULE, "seed": self.seed, "counts": counts, "without": checksums}
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        folder = sources.cache() / self.name
        generated = {split: folder / f"generated-{split}-{key}.tsv" for split in counts}
        return _Files(official, generated, counts, recipe)

    def _contents(self, files: _Files, progress: bool) -> dict[str, bytes]:
        """The verified content of each split, in the form of the official files."""
        official = {split: self._verify(split, path) for split, path in files.official.items()}
        if all(path.is_file() for path in files.generated.values()):
            try:
                return official | files.read_generated()
            except GappedError as problem:
                warnings.warn(f"{problem}; it is generated anew", stacklevel=2)
        self._generate(files, official, progress)
        return official | files.read_generated()

    def _generate(self, files: _Files, official: Mapping[str, bytes], progress: bool) -> None:
        exclude = {text for content in official.values() for text in examples.texts(content)}
        pairs = iter(generate(sum(files.counts.values()), self.seed, exclude=exclude, progress=progress))
        for split, path in files.generated.items():
            recipe = {**files.recipe, "split": split}
            examples.write_generated(path, islice(pairs, files.counts[split]), recipe)

    def _verify(self, split: str, path: Path) -> bytes:
        """The content of an official file."""
        content = examples.read(path)
        digest = hashlib.sha256(content).hexdigest()
        expected = self._official_files[split].sha256
        if digest != expected:
            raise GappedError(
                f"{path}: sha256 {digest}, expected {expected} (not the published file); "
                f"delete or replace it, then run: gapped data {self.name}"
            )
        return content


LISTOPS = ListOpsSource()
