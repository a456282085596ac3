"""BM25 over an index on disk, for corpora larger than memory: tantivy, with English stemming.

The index holds the passages too, so its folder is all that a machine needs. Building it reads the
corpus line by line; searching it maps the files. Needs the extra ``disk``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped,unused-ignore]
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rsipo_lightning.environments.index_cache import cached_index
from rsipo_lightning.environments.retriever import (
    LocalRetriever,
    Passage,
    nothing_found,
    read_passages,
)
from rsipo_lightning.errors import DataError, EnvironmentFault, PluginError, RsipoError
from rsipo_lightning.files import hash_file

if TYPE_CHECKING:
    import tantivy

# In the folder of an index: {"format", "sha256" of the corpus, "passages", "files": {name: [bytes,
# SHA-256 or null]}}
META = "rsipo-index.json"
_FORMAT = 2  # of the folder; tantivy checks its own
_HASHED = 1 << 30  # bytes up to which the files of an index are hashed
_HEAP = 64_000_000  # bytes of postings in memory before they are written
_SHOW = 1000  # passages between two moves of the progress bar


class DiskRetriever(LocalRetriever):
    """BM25 (k1 = 1.2, b = .75) of tantivy over words stemmed by ``en_stem``.

    Queries are words, never query syntax; stop words are left out. Ties go to the passage that
    comes first in the corpus, whatever the order of the segments on disk.
    """

    def __init__(self, folder: Path) -> None:
        """Open an index. Not one, one of another version, or a damaged one: DataError.

        Of files that were changed or cut off. Above 1 GiB only their sizes are looked at: hashing
        them would take seconds.
        """
        check_installed()
        import tantivy

        try:
            meta = json.loads((folder / META).read_bytes())
            if meta["format"] != _FORMAT:
                raise ValueError(f"format {meta['format']}, this version reads {_FORMAT}")
            self.sha256 = str(meta["sha256"])
            _check_files(folder, meta["files"])
            with _panics_as(DataError):
                index = tantivy.Index.open(str(folder))
                index.config_reader("manual")  # it never changes: watch no file
                self._searcher = index.searcher()
            if self._searcher.num_docs != meta["passages"]:
                raise ValueError(f"{self._searcher.num_docs} of {meta['passages']} passages")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = " ".join(str(error).split())
            raise DataError(f"{folder}: not an index that can be opened ({what})") from error
        self._schema = index.schema
        self._analyzer = _query_analyzer()

    @classmethod
    def from_file(cls, path: str | Path) -> DiskRetriever:
        """Open the index of a JSONL corpus, built once into the cache, or the folder of an index.

        A missing, empty or broken file: DataError that names file and line.
        """
        check_installed()
        path = Path(path)
        if path.is_dir():
            return cls(path)
        settings = f"{_FORMAT} tantivy-{version('tantivy')}"
        return cached_index(path, "disk", settings, _write, cls)[0]

    def __len__(self) -> int:
        return self._searcher.num_docs

    def scored(self, queries: Sequence[str], k: int) -> list[list[tuple[Passage, float]]]:
        """See the base class. EnvironmentFault if the index turns out to be damaged."""
        with _panics_as(EnvironmentFault):
            return [self._top(query, k) for query in queries]

    def _top(self, query: str, k: int) -> list[tuple[Passage, float]]:
        import tantivy

        words = self._analyzer.analyze(query)
        if not words or k < 1:
            return []
        terms = [tantivy.Query.term_query(self._schema, "body", word, "freq") for word in words]
        asked = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        limit = 2 * k
        while True:  # until all ties at the border are there
            limit = min(limit, len(self))
            hits = self._searcher.search(asked, limit, count=False).hits
            if len(hits) < limit or limit == len(self) or hits[-1][0] < hits[k - 1][0]:
                break
            limit *= 8
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        best = sorted(zip(hits, rows, strict=True), key=lambda hit: (-hit[0][0], hit[1]))[:k]
        return [(self._passage(address), score) for (score, address), _ in best]

    def _passage(self, address: tantivy.DocAddress) -> Passage:
        stored: Any = self._searcher.doc(address).get_first("passage")
        return Passage(*json.loads(stored))


def check_installed() -> None:
    """PluginError if the extra ``disk`` is missing."""
    if find_spec("tantivy") is None:
        raise PluginError(
            "the on-disk index needs tantivy: pip install 'rsipo-lightning[disk]' "
            "(or env.retriever=bm25, in memory)"
        )


@contextmanager
def _panics_as(fault: type[RsipoError]) -> Iterator[None]:
    """tantivy panics at damaged files, which is no Exception but a BaseException."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        what = " ".join(str(error).split())
        raise fault(f"the index is damaged: {what}; build it again") from error


def _check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """ValueError unless they are as they were written."""
    for name, (size, sha256) in files.items():
        have = (folder / name).stat().st_size
        if have != size:
            raise ValueError(f"{name} has {have} bytes instead of {size}")
        if sha256 and hash_file(folder / name) != sha256:
            raise ValueError(f"{name} was changed")


def _query_analyzer() -> tantivy.TextAnalyzer:
    """``en_stem``, the tokenizer of the index, without stop words."""
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    builder = TextAnalyzerBuilder(Tokenizer.simple()).filter(Filter.remove_long(40))
    builder = builder.filter(Filter.lowercase())
    builder = builder.filter(Filter.custom_stopword(list(STOPWORDS_EN)))
    return builder.filter(Filter.stemmer("english")).build()


def _write(path: Path, folder: Path, sha256: str) -> None:
    try:
        _build(path, folder, sha256)
    except DataError:
        raise
    except ValueError as error:  # what tantivy raises when a file cannot be written
        raise OSError(str(error)) from error


def _build(path: Path, folder: Path, sha256: str) -> None:
    import tantivy

    schema = (
        tantivy.SchemaBuilder()
        .add_text_field("body", tokenizer_name="en_stem", index_option="freq")
        .add_unsigned_field("row", fast=True)
        .add_bytes_field("passage", stored=True)
        .build()
    )
    analyzer = _query_analyzer()
    count, searchable = 0, False
    index = tantivy.Index(schema, path=str(folder))
    with index.writer(_HEAP, num_threads=1) as writer:
        for passage in _shown(path):
            fields = [passage.id, passage.title, passage.text]
            body = f"{passage.title}\n{passage.text}"
            searchable = searchable or bool(analyzer.analyze(body))
            document = tantivy.Document()
            document.add_text("body", body)
            document.add_unsigned("row", count)
            document.add_bytes("passage", json.dumps(fields, ensure_ascii=False).encode())
            writer.add_document(document)
            count += 1
        if not searchable:
            raise nothing_found(path, count)
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    small = sum(file.stat().st_size for file in files) <= _HASHED
    meta = {
        "format": _FORMAT,
        "sha256": sha256,
        "passages": count,
        "files": {f.name: [f.stat().st_size, hash_file(f) if small else None] for f in files},
    }
    (folder / META).write_text(json.dumps(meta))


def _shown(path: Path) -> Iterator[Passage]:
    """The passages of a file, with a progress bar on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("indexing {task.fields[name]}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        bar = bars.add_task("", total=path.stat().st_size, name=path.name)
        for number, (offset, passage) in enumerate(read_passages(path)):
            if number % _SHOW == 0:
                bars.update(bar, completed=offset)
            yield passage
