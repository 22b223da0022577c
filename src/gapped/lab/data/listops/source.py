"""ListOps as a data set of the package: official files where present, the rest generated and cached."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gapped.errors import GappedError, reject
from gapped.lab.data import folders
from gapped.lab.data.listops import files
from gapped.lab.data.listops.examples import ListOps, Split, stack
from gapped.lab.data.listops.generator import RULE, generate
from gapped.lab.data.source import Part

COUNT = 90_000
MAX_TOKENS = 100
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


@dataclass(frozen=True)
class ListOpsSource:
    """`count` training expressions drawn under `seed`; all splits cut to fewer than `max_tokens` tokens.

    What is missing is drawn in one go and then divided, so that all generated splits follow one length law
    and are disjoint from each other and from the official files found. It is kept in the user's cache, one
    file a split, under a name that depends on all of this. Nothing is ever downloaded.
    """

    count: int = COUNT
    seed: int = 0
    max_tokens: int = MAX_TOKENS
    valid: OfficialFile = VALID
    test: OfficialFile = TEST
    name: str = "listops"
    summary: str = "90,000 + 1,000 + 10,000 nested list operations; works offline"

    def __post_init__(self) -> None:
        if not 2 <= self.max_tokens <= _LIMIT:
            raise reject("max_tokens", self.max_tokens, f"a whole number from 2 to {_LIMIT}")
        if self.count < 1:
            raise reject("count", self.count, "a whole number from 1")

    def locate(self, data_dir: Path | None) -> list[Part]:
        found = self._official(data_dir)
        parts = []
        for split, path in self._places(found).items():
            word = "generated" if path.is_file() else "to be generated"
            parts.append(Part(f"{split} ({word})", path if path.is_file() else None))
        return parts + [Part(path.name, path) for path in found.values()]

    def check(self, data_dir: Path | None) -> None:
        pass

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Part]:
        found = self._official(data_dir)
        contents = self._contents(found, progress)
        places = self._places(found)
        for split, content in contents.items():
            files.check(content, (places | found)[split], first=2 if split in places else 1)
        parts = [Part(f"{split} (generated)", path, "sha256, labels") for split, path in places.items()]
        return parts + [Part(path.name, path, "sha256, labels") for path in found.values()]

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> ListOps:
        found = self._official(data_dir)
        contents = self._contents(found, progress)
        places = self._places(found) | found
        splits = {
            split: self._split(contents[split], places[split], official=split in found)
            for split in ("train", "valid", "test")
        }
        return ListOps(self.name, **splits, seed=self.seed, max_tokens=self.max_tokens)

    def _split(self, content: bytes, path: Path, official: bool) -> Split:
        kept = files.examples(content, path, first=1 if official else 2, max_tokens=self.max_tokens)
        return stack(kept, official, content.count(b"\n"))

    def _files(self) -> dict[str, OfficialFile]:
        return {"valid": self.valid, "test": self.test}

    def _official(self, data_dir: Path | None) -> dict[str, Path]:
        found = {split: folders.find(self.name, file.name, data_dir) for split, file in self._files().items()}
        return {split: path for split, path in found.items() if path is not None}

    def _counts(self, found: Mapping[str, Path]) -> dict[str, int]:
        """The splits to be generated, and how large they are."""
        rest = {split: file.count for split, file in self._files().items() if split not in found}
        return {"train": self.count, **rest}

    def _recipe(self, found: Mapping[str, Path]) -> dict[str, object]:
        """All that the generated expressions depend on. Official files are known by their checksums."""
        without = [self._files()[split].sha256 for split in found]
        return {"rule": RULE, "seed": self.seed, "counts": self._counts(found), "without": without}

    def _places(self, found: Mapping[str, Path]) -> dict[str, Path]:
        key = hashlib.sha256(json.dumps(self._recipe(found), sort_keys=True).encode()).hexdigest()[:12]
        folder = folders.cache() / self.name
        return {split: folder / f"generated-{split}-{key}.tsv" for split in self._counts(found)}

    def _contents(self, found: Mapping[str, Path], progress: bool) -> dict[str, bytes]:
        """The verified content of each split, in the form of the official files."""
        official = {split: self._verified(path, self._files()[split]) for split, path in found.items()}
        places = self._places(found)
        recipe = self._recipe(found)
        if all(path.is_file() for path in places.values()):
            try:
                return official | {
                    split: files.read_generated(path, {**recipe, "split": split})
                    for split, path in places.items()
                }
            except GappedError as problem:
                warnings.warn(f"{problem}; it is generated anew", stacklevel=2)
        self._generate(found, official, progress)
        return official | {
            split: files.read_generated(path, {**recipe, "split": split}) for split, path in places.items()
        }

    def _generate(self, found: Mapping[str, Path], official: Mapping[str, bytes], progress: bool) -> None:
        counts = self._counts(found)
        exclude = {text for content in official.values() for text in files.texts(content)}
        rows = generate(sum(counts.values()), self.seed, exclude=exclude, progress=progress)
        recipe = self._recipe(found)
        for split, path in self._places(found).items():
            files.write_generated(path, rows[: counts[split]], {**recipe, "split": split})
            del rows[: counts[split]]

    def _verified(self, path: Path, file: OfficialFile) -> bytes:
        """The content of an official file. Where the checksum is wrong, a bad line says more than digests."""
        content = files.read(path)
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            files.check(content, path)
            raise GappedError(
                f"{path}: sha256 {digest}, expected {file.sha256} (not the published file); "
                f"delete or replace it, then run: gapped data {self.name}"
            )
        return content


LISTOPS = ListOpsSource()
