"""Passages and how they are found: a protocol and the embedded BM25 over memory or a JSONL file.

A file is indexed once. The index lies in ``$RSIPO_CACHE`` (default ``~/.cache/rsipo_lightning``)
under a hash of the file's bytes and the settings, and is memory-mapped. The passages of BM25 stay
in the file and are read by byte offset; disk_retriever.py is for corpora larger than memory.
"""

from __future__ import annotations

import mmap
import re
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import bm25s  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import Stemmer  # type: ignore[import-not-found,import-untyped,unused-ignore]
from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped,unused-ignore]

from rsipo_lightning.environments.index_cache import cached_index
from rsipo_lightning.errors import DataError
from rsipo_lightning.files import parse_object, read_jsonl

_SETTINGS = f"1 bm25s-{bm25s.__version__} lucene k1=1.5 b=.75 english"
_TOKEN = re.compile(r"\w\w+")
_STOPWORDS = frozenset(STOPWORDS_EN)


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable text."""

    id: str
    title: str
    text: str


class Retriever(Protocol):
    """Finds passages. Any exception of ``search`` means that the retriever is dead."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Up to ``k`` passages for each query, best first; [] if nothing matches."""


class LocalRetriever(Retriever):
    """A retriever with its corpus on this machine: what ``rsipo-retriever`` can serve."""

    sha256: str  # of the corpus file; "" for passages in memory

    @abstractmethod
    def __len__(self) -> int:
        """Number of passages."""

    @abstractmethod
    def scored(self, queries: Sequence[str], k: int) -> list[list[tuple[Passage, float]]]:
        """Up to ``k`` passages with their scores for each query, best first; ties in the order of
        the corpus. A query without a word that the corpus knows gives [].
        """

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """What :meth:`scored` finds, without the scores."""
        return [[passage for passage, _ in found] for found in self.scored(queries, k)]


class BM25Retriever(LocalRetriever):
    """BM25 (Lucene variant) on the numpy backend of bm25s, with English stemming and stop words.

    Ties go to the passage that comes first in the corpus, so results do not depend on the machine.
    """

    def __init__(self, passages: Sequence[Passage], index: Any, sha256: str = "") -> None:
        self.passages = passages
        self.sha256 = sha256
        self._index = index
        self._stem = Stemmer.Stemmer("english").stemWords

    @classmethod
    def from_passages(cls, passages: Sequence[Passage]) -> BM25Retriever:
        """Index passages in memory. None at all: DataError."""
        return cls(passages, _build((f"{p.title}\n{p.text}" for p in passages), "the corpus"))

    @classmethod
    def from_file(cls, path: str | Path) -> BM25Retriever:
        """Open a JSONL corpus of rows {id, title, text} or {id, contents}; builds its index once.

        A missing, empty or broken file: DataError that names file and line.
        """
        path = Path(path)
        (index, offsets), sha256 = cached_index(path, "bm25", _SETTINGS, _write, _open)
        return cls(_FilePassages(path, offsets), index, sha256)

    def __len__(self) -> int:
        return len(self.passages)

    def scored(self, queries: Sequence[str], k: int) -> list[list[tuple[Passage, float]]]:
        """See the base class."""
        return [[(self.passages[i], score) for i, score in self._top(q, k)] for q in queries]

    def _top(self, query: str, k: int) -> list[tuple[int, float]]:
        tokens = self._index.get_tokens_ids(self._stem(_tokens(query)))
        if not tokens or k < 1:
            return []
        scores = self._index.get_scores_from_ids(tokens)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # keep all ties at the border, then sort few
            border = np.partition(scores[found], -k)[-k]
            found = found[scores[found] >= border]
        order = np.argsort(-scores[found], kind="stable")[:k]
        return [(int(i), float(scores[i])) for i in found[order]]


def to_passage(row: dict[str, Any], where: str) -> Passage:
    """{id, title, text}, or FlashRAG's {id, contents} with the title on the first line."""
    row = dict(row)
    if isinstance(contents := row.get("contents"), str):
        title, _, text = contents.partition("\n")
        row.setdefault("title", title.strip().strip('"'))
        row.setdefault("text", text.strip())
    if isinstance(row.get("id"), int):
        row["id"] = str(row["id"])
    for key in ("id", "title", "text"):
        if not isinstance(row.get(key), str):
            what = "must be text" if key in row else "is missing"
            raise DataError(
                f"{where}: field '{key}' {what} (rows: id, title, text or id, contents)"
            )
    return Passage(row["id"], row["title"], row["text"])


def read_passages(path: Path) -> Iterator[tuple[int, Passage]]:
    """(byte offset, passage) of each row, one at a time. A broken row: DataError "file:line: what".

    An id that is there twice is a DataError too, after the last row: of those before, only 8 bytes
    each are kept.
    """
    hashes = array("q")
    for number, offset, row in read_jsonl(path):
        passage = to_passage(row, f"{path}:{number}")
        hashes.append(hash(passage.id))
        yield offset, passage
    ordered = np.sort(np.asarray(hashes, dtype=np.int64))
    twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    lines: dict[str, int] = {}
    for number, _, row in read_jsonl(path) if twice else ():
        ident = to_passage(row, f"{path}:{number}").id
        if hash(ident) in twice:
            if ident in lines:
                raise DataError(f"{path}:{number}: id '{ident}' is also on line {lines[ident]}")
            lines[ident] = number


def nothing_found(name: Path | str, passages: int) -> DataError:
    """The error for a corpus that no query can find anything in."""
    return DataError(f"{name}: holds no {'words that can be searched' if passages else 'passages'}")


class _FilePassages(Sequence[Passage]):
    """The rows of a corpus file, each parsed when it is asked for."""

    def __init__(self, path: Path, offsets: Any) -> None:
        self._path = path
        self._offsets = offsets
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: Any) -> Any:
        start = int(self._offsets[i])
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        where = f"{self._path} at byte {start}"
        return to_passage(parse_object(line, where), where)


def _tokens(text: str) -> list[str]:
    return [word for word in _TOKEN.findall(text.lower()) if word not in _STOPWORDS]


def _build(texts: Iterable[str], name: str) -> Any:
    """An index. bm25s would number the tokens by a set, hence differently in each process."""
    stem = Stemmer.Stemmer("english").stemWord
    stems: dict[str, int] = {}  # word: number of its stem
    vocabulary: dict[str, int] = {}
    rows = []
    for text in texts:
        row = []
        for word in _tokens(text):
            if word not in stems:
                stems[word] = vocabulary.setdefault(stem(word), len(vocabulary))
            row.append(stems[word])
        rows.append(row)
    if not vocabulary:
        raise nothing_found(name, len(rows))
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend="numpy")
    index.index((rows, vocabulary), show_progress=False)
    return index


def _write(path: Path, folder: Path, sha256: str) -> None:
    offsets = array("q")

    def texts() -> Iterator[str]:
        for offset, passage in read_passages(path):
            offsets.append(offset)
            yield f"{passage.title}\n{passage.text}"

    _build(texts(), str(path)).save(folder, show_progress=False)
    np.save(folder / "offsets.npy", np.asarray(offsets, dtype=np.int64))


def _open(folder: Path) -> tuple[Any, Any]:
    """The memory-mapped index and offsets."""
    index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    return index, np.load(folder / "offsets.npy", mmap_mode="r")
