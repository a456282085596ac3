"""BM25 over memory and over files: what is found, what is cached, what is refused."""

import json
import os

import numpy as np
import pytest

from rsipo_lightning.environments.retriever import BM25Retriever, Passage
from rsipo_lightning.errors import DataError

ROWS = [
    {"id": "a", "title": "Otter", "text": "An otter swims in the river."},
    {"id": "b", "title": "Beaver", "text": "The beaver builds dams across a river."},
    {"id": 3, "contents": '"Kestrel"\nA kestrel hovers over fields.'},
    {"id": "d", "title": "Élan", "text": "Ein Élan läuft — weit."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RSIPO_CACHE", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), "utf-8")
    return path


def _titles(found):
    return [[passage.title for passage in row] for row in found]


def test_finds_ranks_and_stems(corpus):
    retriever = BM25Retriever.from_file(corpus)
    queries = ["swimming otters", "river dam", "kestrels", "élan"]
    assert _titles(retriever.search(queries, 1)) == [["Otter"], ["Beaver"], ["Kestrel"], ["Élan"]]
    assert retriever.search(["kestrel"], 1)[0][0] == Passage(
        "3", "Kestrel", "A kestrel hovers over fields."
    )


@pytest.mark.parametrize("query", ["", "   ", "the of and", "xylophone", "?!", "a"])
def test_queries_without_a_known_word_find_nothing(corpus, query):
    assert BM25Retriever.from_file(corpus).search([query], 3) == [[]]


def test_k_beyond_the_corpus_and_no_filling_with_zero_scores(corpus):
    found = _titles(BM25Retriever.from_file(corpus).search(["river"], 99))
    assert sorted(found[0]) == ["Beaver", "Otter"]


def test_ties_go_to_the_earlier_passage():
    passages = [Passage(str(i), f"Page {i}", "same words here") for i in range(20)]
    found = BM25Retriever.from_passages(passages).search(["words"], 5)[0]
    assert [passage.id for passage in found] == ["0", "1", "2", "3", "4"]


def test_memory_and_file_agree(corpus):
    file = BM25Retriever.from_file(corpus)
    memory = BM25Retriever.from_passages(list(file.passages))
    queries = ["river", "otter river dam", "fields"]
    assert file.search(queries, 3) == memory.search(queries, 3)


def test_index_is_built_once_and_memory_mapped(corpus, cache):
    BM25Retriever.from_file(corpus)
    (folder,) = cache.iterdir()  # nothing temporary is left
    stamp = (folder / "offsets.npy").stat().st_mtime_ns
    again = BM25Retriever.from_file(corpus)
    assert (folder / "offsets.npy").stat().st_mtime_ns == stamp
    assert isinstance(again._index.scores["data"], np.memmap)
    assert isinstance(again.passages._offsets, np.memmap)


def test_a_changed_file_gets_its_own_index(corpus, cache):
    BM25Retriever.from_file(corpus)
    corpus.write_text(json.dumps({"id": "z", "title": "Zebra", "text": "A zebra."}))
    assert _titles(BM25Retriever.from_file(corpus).search(["zebra"], 3)) == [["Zebra"]]
    assert len(list(cache.iterdir())) == 2


def test_a_broken_index_is_rebuilt(corpus, cache):
    BM25Retriever.from_file(corpus)
    (folder,) = cache.iterdir()
    os.truncate(folder / "offsets.npy", 10)
    assert _titles(BM25Retriever.from_file(corpus).search(["otter"], 1)) == [["Otter"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corpus.jsonl: holds no passages"),
        (b"\n  \n", "corpus.jsonl: holds no passages"),
        (b'{"id": "a", "title": "", "text": ""}', "corpus.jsonl: holds no words"),
        (b'{"id": "a", "title": "x", "text": "y"}\n\n{"id": ', "corpus.jsonl:3: not JSON"),
        (b'["a"]', "corpus.jsonl:1: a JSON object is expected, not list"),
        (b'{"id": "a", "title": "x"}', "corpus.jsonl:1: field 'text' is missing"),
        (b'{"title": "x", "text": "y"}', "corpus.jsonl:1: field 'id' is missing"),
        (b'{"id": "a", "title": 5, "text": "y"}', "corpus.jsonl:1: field 'title' must be text"),
        (b'{"id": "a", "title": "\xff", "text": "y"}', "corpus.jsonl:1: not UTF-8"),
    ],
)
def test_broken_corpus_names_file_and_line(tmp_path, cache, content, message):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        BM25Retriever.from_file(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_missing_file_and_unwritable_cache(tmp_path, corpus, monkeypatch):
    with pytest.raises(DataError, match=r"nowhere.jsonl: cannot be read"):
        BM25Retriever.from_file(tmp_path / "nowhere.jsonl")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("RSIPO_CACHE", str(blocked))
    with pytest.raises(DataError, match="RSIPO_CACHE"):
        BM25Retriever.from_file(corpus)


def test_empty_memory_corpus():
    with pytest.raises(DataError, match="the corpus: holds no passages"):
        BM25Retriever.from_passages([])
