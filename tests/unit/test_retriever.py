"""Retrievers over memory and over files: what is cached and what is refused.

What all of them find is in test_http_retriever.py.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import numpy as np
import pytest

from rsipo_lightning.environments import disk_retriever, index_cache, retriever
from rsipo_lightning.environments.disk_retriever import META, DiskRetriever
from rsipo_lightning.environments.retriever import BM25Retriever, Passage
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.errors import DataError, EnvironmentFault, PluginError

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(params=[BM25Retriever, DiskRetriever])
def kind(request):
    return request.param


def _titles(found):
    return [[passage.title for passage in row] for row in found]


def test_any_k(kind, corpus):
    made = kind.from_file(corpus)
    assert [len(made.search(["river"], k)[0]) for k in (-1, 10**9)] == [0, 2]


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


def test_a_changed_file_gets_its_own_index(kind, corpus, cache):
    kind.from_file(corpus)
    corpus.write_text(json.dumps({"id": "z", "title": "Zebra", "text": "A zebra."}))
    assert _titles(kind.from_file(corpus).search(["zebra"], 3)) == [["Zebra"]]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("kind", "file"), [(BM25Retriever, "offsets.npy"), (DiskRetriever, "meta.json")]
)
def test_a_broken_index_is_rebuilt(kind, file, corpus, cache):
    kind.from_file(corpus)
    (folder,) = cache.iterdir()
    os.truncate(folder / file, 10)
    assert _titles(kind.from_file(corpus).search(["otter"], 1)) == [["Otter"]]
    assert list(cache.iterdir()) == [folder]


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
        (
            b'{"id": 1, "contents": "river"}\n\n{"id": "2", "contents": "x"}\n'
            b'{"id": "1", "contents": "otter"}',
            "corpus.jsonl:4: id '1' is also on line 1",
        ),
    ],
)
def test_broken_corpus_names_file_and_line(kind, tmp_path, cache, content, message):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        kind.from_file(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_missing_file_and_unwritable_cache(kind, tmp_path, corpus, monkeypatch):
    with pytest.raises(DataError, match=r"nowhere.jsonl: cannot be read"):
        kind.from_file(tmp_path / "nowhere.jsonl")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("RSIPO_CACHE", str(blocked))
    with pytest.raises(DataError, match="RSIPO_CACHE"):
        kind.from_file(corpus)


def test_empty_memory_corpus():
    with pytest.raises(DataError, match="the corpus: holds no passages"):
        BM25Retriever.from_passages([])


@pytest.mark.parametrize("locks", [True, False])
def test_who_comes_while_an_index_is_built_waits_for_it(corpus, cache, monkeypatch, locks):
    """Without locks both build, and the first to be done wins."""
    write, built, all_built = disk_retriever._write, [], Barrier(4)

    def slow(path, folder, sha256):
        write(path, folder, sha256)
        built.append(folder)
        if not locks:
            all_built.wait(30)

    def no_locks(*args):
        raise OSError

    monkeypatch.setattr(disk_retriever, "_write", slow)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(DiskRetriever.from_file, [corpus] * 4))
    assert len(built) == (1 if locks else 4)
    assert [_titles(one.search(["otter"], 1)) for one in made] == [[["Otter"]]] * 4
    assert len(list(cache.iterdir())) == 1


def test_only_who_needs_the_same_index_waits(kind, corpus, cache, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text() + "\n")
    module = {BM25Retriever: retriever, DiskRetriever: disk_retriever}[kind]
    write, waiting = module._write, Event()
    monkeypatch.setattr(index_cache, "print", lambda *a, **k: waiting.set(), raising=False)

    def slow(path, folder, sha256):
        write(path, folder, sha256)
        if path == corpus:
            pool.submit(kind.from_file, other).result(30)
            same.append(pool.submit(kind.from_file, corpus))
            assert waiting.wait(30)

    monkeypatch.setattr(module, "_write", slow)
    same = []
    with ThreadPoolExecutor(2) as pool:
        kind.from_file(corpus)
        assert same[0].result(30).search(["otter"], 1)
    assert len(same) == 1
    assert len(list(cache.iterdir())) == 2


def test_what_a_killed_build_left_is_removed(kind, corpus, cache):
    kind.from_file(corpus)
    (folder,) = cache.iterdir()
    (folder / "some of it").write_text("")
    folder.rename(cache / f".{folder.name}-x.part")
    kind.from_file(corpus)
    assert list(cache.iterdir()) == [folder]


def test_the_hash_of_a_large_corpus_is_remembered(corpus, cache, monkeypatch):
    monkeypatch.setattr(index_cache, "_REMEMBER", 1)
    sha256 = index_cache.remembered_hash(corpus)
    assert sha256 == index_cache.hash_file(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(index_cache, "hash_file", None)
        assert index_cache.remembered_hash(corpus) == sha256
    with corpus.open("a") as file:
        file.write("\n")
    assert index_cache.remembered_hash(corpus) == index_cache.hash_file(corpus) != sha256


# the index on disk


def test_the_folder_of_an_index_is_all_that_is_needed(corpus, cache, tmp_path):
    made = DiskRetriever.from_file(corpus)
    (folder,) = cache.iterdir()
    shutil.move(folder, tmp_path / "index")
    corpus.unlink()
    opened = DiskRetriever.from_file(tmp_path / "index")
    assert (len(opened), opened.sha256) == (4, made.sha256)
    queries = ["river", "otter river dam", "Élan"]
    assert opened.scored(queries, 3) == made.scored(queries, 3)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("what", ["empty", "format", "count", "files", "size", "list", "nested"])
def test_a_folder_that_is_no_index(corpus, cache, what):
    DiskRetriever.from_file(corpus)
    (folder,) = cache.iterdir()
    meta = json.loads((folder / META).read_text())
    if what == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif what == "files":
        next(folder.glob("*.idx")).unlink()
    elif what == "size":
        next(folder.glob("*.pos")).open("a").write("x")
    elif what == "nested":
        (folder / META).write_text("[" * 100_000)
    else:
        changed = {"format": {"format": 99}, "count": {"passages": 5}, "list": {"files": []}}[what]
        (folder / META).write_text(json.dumps(meta | changed))
    with pytest.raises(DataError, match=f"^{folder}: not an index that can be opened") as caught:
        DiskRetriever.from_file(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="Is a directory"):
        BM25Retriever.from_file(folder)


def _change(file, place=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 255
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["fast", "fieldnorm", "idx", "store", "term", "pos"])
def test_one_changed_byte_is_found(corpus, cache, part):
    """tantivy itself panics, or answers something else."""
    DiskRetriever.from_file(corpus)
    (folder,) = cache.iterdir()
    (file,) = folder.glob(f"*.{part}")
    _change(file)
    with pytest.raises(DataError, match=rf"not an index that can be opened \({file.name} was"):
        DiskRetriever.from_file(folder)
    assert _titles(DiskRetriever.from_file(corpus).search(["otter"], 1)) == [["Otter"]]  # rebuilt
    assert DiskRetriever.from_file(folder)


def test_a_panic_of_tantivy_is_an_error_of_ours(corpus, cache, monkeypatch):
    """Of an index that is too large to be hashed, when it is opened and when it is searched."""
    monkeypatch.setattr(disk_retriever, "_HASHED", 1)
    DiskRetriever.from_file(corpus)
    (folder,) = cache.iterdir()
    files = json.loads((folder / META).read_text())["files"]
    assert [sha256 for _, sha256 in files.values()] == [None] * len(files)
    (file,) = folder.glob("*.fast")
    _change(file, 8)
    with pytest.raises(EnvironmentFault, match=r"the index is damaged: .*; build it again"):
        DiskRetriever.from_file(folder).search(["otter"], 1)
    _change(file, 40)
    with pytest.raises(DataError, match=r"not an index that can be opened \(the index is damaged"):
        DiskRetriever.from_file(folder)
    assert _titles(DiskRetriever.from_file(corpus).search(["otter"], 1)) == [["Otter"]]  # rebuilt


def test_a_full_disk_is_one_line_and_leaves_nothing(corpus, cache):
    """Files limited to a block: the operating system says no in the middle of the build."""
    with corpus.open("a") as file:
        for i in range(20_000):
            file.write("\n" + json.dumps({"id": i, "title": "", "text": os.urandom(40).hex(" ")}))
    server = [sys.executable, "-m", "rsipo_lightning.retriever_server", "--port", "0"]
    limited = f"ulimit -f 500; exec {shlex.join([*server, '--index', 'disk', str(corpus)])}"
    done = subprocess.run(["bash", "-c", limited], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("rsipo-retriever: error: ")
    assert line.endswith("point RSIPO_CACHE at a folder with space")
    assert not list(cache.iterdir())


def test_ties_across_segments_go_to_the_earlier_passage(tmp_path, monkeypatch):
    """A small heap makes many segments, which are merged in any order."""
    monkeypatch.setattr(disk_retriever, "_HEAP", 15_000_000)
    path = tmp_path / "corpus.jsonl"
    texts = [f"words w{i} " + " ".join(f"x{i * 40 + j}" for j in range(40)) for i in range(300)]
    with path.open("w") as file:
        for i in range(30_000):
            file.write(json.dumps({"id": i, "title": "", "text": texts[i % 300]}) + "\n")
    made = DiskRetriever.from_file(path)
    assert made._searcher.num_segments > 1
    found = made.search(["words", "w7 x280", texts[299]], 50)
    assert [[int(passage.id) for passage in row] for row in found] == [
        list(range(50)),
        list(range(7, 15_000, 300)),
        list(range(299, 15_000, 300)),
    ]


def test_without_tantivy_a_line_says_what_to_install(corpus, monkeypatch, capsys):
    from rsipo_lightning.cli import fit_main

    monkeypatch.setitem(sys.modules, "tantivy", None)
    monkeypatch.chdir(corpus.parent)
    keys = [f"env.questions={corpus}", f"env.corpus={corpus}", "env.retriever=disk"]
    assert fit_main(["--algo", "grpo", "--env", "search", *keys]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rsipo-fit: error: the on-disk index needs tantivy: pip install ")
    assert "'rsipo-lightning[disk]'" in line
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]
    with pytest.raises(PluginError):
        DiskRetriever(corpus)


def test_the_suite_over_the_disk(corpus, tmp_path, cache):
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": f"Who swims {i}?", "answers": ["Otter"]} for i in range(40)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    config = SearchConfig(questions=str(questions), corpus=str(corpus), retriever="disk")
    suite = SearchSuite(config, 0)
    assert _titles(suite.retrieve(["swimming otter"])) == [["Otter"]]
    described = suite.describe()
    (folder,) = cache.iterdir()
    config.corpus = str(folder)
    again = SearchSuite(config, 0).describe()
    assert described["passages"] == again["passages"] == 4
    sha256 = index_cache.hash_file(corpus)
    assert described["files"]["corpus"] == [{"path": str(corpus), "sha256": sha256}]
    assert again["files"]["corpus"] == [{"path": str(folder), "sha256": sha256}]
