"""The HTTP retriever against the real server and against servers that misbehave."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

import pytest

from rsipo_lightning import web
from rsipo_lightning.environments.disk_retriever import DiskRetriever
from rsipo_lightning.environments.http_retriever import HTTPRetriever
from rsipo_lightning.environments.retriever import BM25Retriever, Passage
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:1"
ROWS = [
    {"id": "a", "title": "Otter", "text": "An otter swims in the river."},
    {"id": "b", "title": "Beaver", "text": "The beaver builds dams across a river."},
    {"id": 3, "contents": '"Kestrel"\nA kestrel hovers over fields.'},
    {"id": "d", "title": "Élan", "text": "Ein Élan läuft — weit."},
    {"id": "e", "title": '"Heroes" (song)', "text": "  A song about heroes.\nTwo lines. "},
    *({"id": f"tie {i}", "title": f"Tie {i}", "text": "Equal words."} for i in range(4)),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(web, "PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSIPO_CACHE", str(path.parent / "cache"))
        yield path


@contextmanager
def process(*argv):
    """The real server. Yields (process, its first line)."""
    command = [sys.executable, "-m", "rsipo_lightning.retriever_server", *map(str, argv)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            yield server, server.stdout.readline()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url(corpus):
    with process(corpus, "--port", 0, "--topk-max", 99) as (_, line):
        match = re.fullmatch(r"serving 9 passages on (http://127\.0\.0\.1:\d+)\n", line)
        assert match, line
        yield match[1]


@pytest.fixture(scope="module")
def disk_url(corpus):
    with process(corpus, "--port", 0, "--index", "disk") as (_, line):
        assert line.startswith("serving 9 passages on http://127.0.0.1:"), line
        yield line.split()[-1]


KINDS = ["bm25", "disk", "http", "http single", "http disk"]


def opened(kind, corpus, request):
    """A new retriever of a kind."""
    if not kind.startswith("http"):
        return {"bm25": BM25Retriever, "disk": DiskRetriever}[kind].from_file(corpus)
    url = request.getfixturevalue("disk_url" if kind == "http disk" else "url")
    return HTTPRetriever(url, 10, 0, "single" if kind == "http single" else "batch")


@pytest.fixture(params=KINDS)
def retriever(request, corpus):
    return opened(request.param, corpus, request)


# the contract of all retrievers


def test_finds_in_the_order_of_the_queries(retriever):
    queries = ["swimming otters", "river dam", "kestrels", "élan", "river dam"]
    found = retriever.search(queries, 1)
    titles = [[passage.title for passage in row] for row in found]
    assert titles == [["Otter"], ["Beaver"], ["Kestrel"], ["Élan"], ["Beaver"]]
    assert found[2] == [Passage("3", "Kestrel", "A kestrel hovers over fields.")]


def test_passages_are_those_of_the_corpus_to_the_letter(retriever):
    for row in ROWS[:2] + ROWS[3:5]:
        assert retriever.search([row["title"]], 1) == [[Passage(**row)]]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "xylophone", "?!", "a"])
def test_queries_without_a_known_word_find_nothing(retriever, query):
    assert retriever.search([query], 3) == [[]]


def test_number_of_passages(retriever):
    assert [len(retriever.search(["river"], k)[0]) for k in (0, 1, 2, 99)] == [0, 1, 2, 2]
    assert retriever.search([], 3) == []


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_ties_go_to_the_earlier_passage(retriever, k):
    found = retriever.search(["words equal"], k)[0]
    assert [passage.id for passage in found] == [f"tie {i}" for i in range(k)]


@pytest.mark.parametrize(
    "form",
    [
        "NOT {}",
        "+{} -zzz",
        "{} AND zzz",
        "zzz OR {}",
        "-{}",
        '"{} zzz"',
        "({}",
        "{})",
        "[{} TO",
        "title:{}",
        "row:{}",
        "{}:",
        "{}^9",
        "{}~9",
        "{}*zzz",
        "/{}/",
        "\\{}",
        "{}\x00",
        "\u202e{} \U0001f9a6 \u0e01\u0e33 IN [zzz]",
        "<search>{}</search>",
        "the {} of " + "zzz " * 5000,
    ],
)
def test_a_query_is_words_and_never_syntax(retriever, form):
    assert _titles(retriever.search([form.format("kestrel")], 3)) == [["Kestrel"]]


@pytest.mark.parametrize("query", ["AND", "OR", "*", '"', ":", "(", "^", "~", "\\", "AND OR NOT"])
def test_syntax_alone_finds_nothing(retriever, query):
    assert retriever.search([query], 3) == [[]]


@pytest.mark.parametrize("kind", KINDS)
def test_opened_again_it_finds_the_same(kind, corpus, request):
    queries = ["river", "equal otters", "kestrel fields river", "song"]
    one, two = (opened(kind, corpus, request).search(queries, 9) for _ in range(2))
    assert one == two
    assert [len(found) for found in one] == [2, 5, 3, 1]


def test_a_result_that_is_changed_does_not_change_the_next(retriever):
    retriever.search(["river"], 2)[0].clear()
    assert len(retriever.search(["river"], 2)[0]) == 2


# the real server


def _post(url, body, path="/retrieve", method="POST", headers=()):
    connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
    body = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_the_server_speaks_the_protocol(url):
    document = {
        "id": "a",
        "contents": "Otter\nAn otter swims in the river.",
        "title": "Otter",
        "text": "An otter swims in the river.",
    }
    status, batch = _post(url, {"queries": ["otter", "zzz"], "topk": 3, "return_scores": True})
    assert (status, batch["result"][1]) == (200, [])
    ((found,),) = batch["result"][:1]
    assert found["document"] == document
    assert found["score"] > 0
    assert _post(url, {"query": "otter"})[1] == {"result": [[found]]}
    assert _post(url, {"queries": ["otter"], "return_scores": False})[1] == {"result": [[document]]}
    assert _post(url, None, "/health", "GET") == (200, {"status": "ok", "passages": 9})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"{", "not JSON"),
        (b"[]", "a JSON object is expected, not list"),
        (b'{"queries": ["\xff"]}', "not UTF-8"),
        ({}, '"queries" must be a list'),
        ({"queries": "otter"}, '"queries" must be a list'),
        ({"query": 5}, '"query" one text'),
        ({"queries": ["a"], "topk": 0}, '"topk" must be a whole number from 1 to 99'),
        ({"queries": ["a"], "topk": 100}, "from 1 to 99"),
        ({"queries": ["a"], "topk": True}, '"topk"'),
        ({"queries": ["a"], "return_scores": 1}, '"return_scores"'),
    ],
)
def test_the_server_refuses_bad_requests_and_lives_on(url, body, what):
    status, answer = _post(url, body)
    assert status == 400
    assert what in answer["error"]
    assert _post(url, {"query": "otter"})[0] == 200


def test_the_server_refuses_other_paths_and_sizes(url):
    assert _post(url, {}, "/nope")[0] == 404
    assert _post(url, None, "/retrieve", "GET")[0] == 404
    for length in ("99999999999", "9" * 5000):
        assert _post(url, None, headers=[("Content-Length", length)])[0] == 400


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["CORPUS", "--port", "70000"], "--port 70000: must be 0 to 65535"),
        (["CORPUS", "--topk-max", "0"], "--topk-max 0: must be at least 1"),
        (["nowhere.jsonl", "--port", "0"], "nowhere.jsonl: cannot be read"),
        (["CORPUS", "--port", "TAKEN"], "Address already in use"),
    ],
)
def test_the_server_that_cannot_start_says_so_in_a_line(corpus, url, argv, what):
    names = {"CORPUS": str(corpus), "TAKEN": url.rsplit(":", 1)[1]}
    with process(*[names.get(word, word) for word in argv]) as (server, line):
        assert server.wait(30) == 2
        (error,) = server.stderr.read().splitlines()
    assert line == ""
    assert error.startswith("rsipo-retriever: error: ")
    assert what in error


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="a shell's & made us ignore Ctrl-C"
)
def test_ctrl_c_ends_the_server_without_a_traceback(corpus):
    with process(corpus, "--port", 0) as (server, line):
        assert line.startswith("serving")
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 130
        assert server.stderr.read() == "rsipo-retriever: stopped by Ctrl-C\n"


# servers that misbehave


class Fake:
    """A server that answers as ``answer(handler, request)`` says once its client is made."""

    def __init__(self, answer=None):
        self.answer = answer
        self.requests = []
        self._lock = Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = json.loads(body)
                with fake._lock:
                    fake.requests.append(request)
                (fake.answer or fake.right)(self, request)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *args: None  # clients hang up on it
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def right(handler, request):
        queries = request["queries"] if "queries" in request else [request["query"]]
        rows = [[{"document": {"id": q, "contents": f"{q}\ntext"}, "score": 1}] for q in queries]
        send(handler, {"result": rows})

    def retriever(self, timeout_s=5, retries=2, protocol="batch", **keys):
        made = HTTPRetriever(self.url, timeout_s, retries, protocol, **keys)
        self.requests.clear()
        return made

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def send(handler, body, status=200, kind="application/json", length=None, **headers):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for key, value in headers.items():
        handler.send_header(key, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def fake():
    made = Fake()
    yield made
    made.close()


def _titles(rows):
    return [[passage.title for passage in row] for row in rows]


def test_the_request_queries_once_and_the_cache(fake):
    retriever = fake.retriever()
    assert _titles(retriever.search(["x", "y", "x"], 2)) == [["x"], ["y"], ["x"]]
    assert fake.requests == [{"queries": ["x", "y"], "topk": 2, "return_scores": True}]
    assert _titles(retriever.search(["y", "z", "x"], 2)) == [["y"], ["z"], ["x"]]
    assert [request["queries"] for request in fake.requests[1:]] == [["z"]]
    retriever.search(["x"], 3)  # another k is another question
    assert fake.requests[2:] == [{"queries": ["x"], "topk": 3, "return_scores": True}]


def test_the_cache_forgets_what_was_used_longest_ago(fake):
    retriever = fake.retriever(cache=2)
    for queries in (["x"], ["y"], ["x"], ["z"], ["x"]):
        retriever.search(queries, 1)
    assert [request["queries"] for request in fake.requests] == [["x"], ["y"], ["z"]]
    assert _titles(retriever.search(["1", "2", "3"], 1)) == [["1"], ["2"], ["3"]]
    retriever.search(["y"], 1)
    assert fake.requests[-1]["queries"] == ["y"]


def test_single_sends_one_query_a_request(fake):
    retriever = fake.retriever(protocol="single")
    queries = [str(i) for i in range(30)]
    assert _titles(retriever.search(queries, 1)) == [[query] for query in queries]
    assert sorted(request["query"] for request in fake.requests) == sorted(queries)
    fake.answer = lambda handler, request: send(handler, {"result": [{"id": "1", "contents": "a"}]})
    assert retriever.search(["flat"], 1) == [[Passage("1", "a", "")]]
    fake.answer = lambda handler, request: send(handler, {"result": []})
    assert retriever.search(["none"], 1) == [[]]


@pytest.mark.parametrize(
    "item",
    [
        {"document": {"id": "7", "contents": '"T"\nx y'}, "score": 0.5},
        {"document": {"id": 7, "title": "T", "text": "x y"}},
        {"id": "7", "contents": "T\nx y"},
        {"id": 7, "title": "T", "text": "x y", "score": 1},
    ],
)
def test_documents_of_every_form(fake, item):
    retriever = fake.retriever()
    fake.answer = lambda handler, request: send(handler, {"result": [[item] * 5]})
    assert retriever.search(["q"], 2) == [[Passage("7", "T", "x y")] * 2]  # not more than asked


def _raw(data):
    return lambda handler, request: send(handler, data)


NO_SCORE = "a score is no finite number"
PAGE = b"<html>\n<h1>\x1b[31mBad gateway</h1>" + b"x" * 9999
WRONG = {
    "html": (lambda h, r: send(h, PAGE, kind="text/html"), r"not JSON .*text/html came: '<html>"),
    "not utf-8": (_raw(b'{"result": "\xff"}'), "not UTF-8"),
    "list": (_raw([[]]), "a JSON object is expected, not list"),
    "no result": (_raw({"results": [[]]}), "is not {"),
    "null": (_raw({"result": None}), "is not {"),
    "flat": (_raw({"result": [{"id": "1", "contents": "x"}]}), "is not {"),
    "texts": (_raw({"result": [["a"]]}), "is not {"),
    "pairs": (_raw({"result": [[[{"id": "1", "contents": "x"}, 0.5]]]}), "is not {"),
    "no id": (_raw({"result": [[{"document": {"contents": "x"}}]]}), "'id' is missing"),
    "number": (_raw({"result": [[{"id": "1", "contents": 5}]]}), "'title' is missing"),
    "nan": (_raw({"result": [[{"id": "1", "contents": "x", "score": float("nan")}]]}), NO_SCORE),
    "infinite": (
        _raw(b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": 1e999}]]}'),
        NO_SCORE,
    ),
    **{
        f"score {score}": (
            _raw({"result": [[{"document": {"id": "1", "contents": "x"}, "score": score}]]}),
            NO_SCORE,
        )
        for score in ("abc", [1], True)
    },
    "empty": (_raw(b""), "not JSON"),
    "no document": (_raw({"result": [[{"document": None, "score": 1}]]}), "is not {"),
    "half": (_raw({"result": [[{"id": "1", "contents": "\ud800"}]]}), "half a character"),
    "too many": (_raw({"result": [[], []]}), "2 results for 1 queries"),
    "too few": (_raw({"result": []}), "0 results for 1 queries"),
    "refused": (lambda h, r: send(h, {"detail": "no"}, 422), r"HTTP 422 '{\"detail\": \"no\"}'"),
    "huge": (_raw(b" " * 100_001), "larger than 100,000 bytes"),
    "moved": (
        lambda h, r: send(h, b"", 307, Location="http://127.0.0.1:9/retrieve"),
        "HTTP 307, redirects to 'http://127.0.0.1:9/retrieve': not followed",
    ),
}


@pytest.mark.parametrize(("answer", "what"), WRONG.values(), ids=WRONG)
def test_nonsense_is_a_fault_at_once(fake, answer, what):
    retriever = fake.retriever(max_bytes=100_000)
    fake.answer = answer
    with pytest.raises(EnvironmentFault, match=what) as caught:
        retriever.search(["q"], 3)
    message = str(caught.value)
    assert message.startswith(f"{fake.url}: ")
    assert message.isprintable()  # one line, no escape codes of the server
    assert len(message) < 400
    assert len(fake.requests) == 1
    fake.answer = None
    assert _titles(retriever.search(["q"], 3)) == [["q"]]  # nothing of it was cached


def _dies(handler, request):
    """Half a line of the head, then nothing more."""
    handler.wfile.write(b"HTTP/1.1 20")
    handler.close_connection = True


def _drips(handler, request):
    """Never silent for long, never done."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def _drips_headers(handler, request):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(40):
        handler.wfile.write(b"X-%d: 1\r\n" % i)
        time.sleep(0.05)


def _says_100_for_ever(handler, request):
    for _ in range(100):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


BROKEN = {
    "500": (lambda h, r: send(h, b"oh\n", 500), r"HTTP 500 'oh\\n'"),
    "503 page": (lambda h, r: send(h, PAGE, 503, "text/html"), "HTTP 503 '<html>"),
    "slow": (lambda h, r: time.sleep(1), r"no whole answer within 0\.3 s"),
    "drips": (_drips, r"no whole answer within 0\.3 s"),
    "drips headers": (_drips_headers, r"no whole answer within 0\.3 s"),
    "100 for ever": (_says_100_for_ever, r"no whole answer within 0\.3 s"),
    "length of many digits": (lambda h, r: send(h, b"{}", length="9" * 5000), "IncompleteRead"),
    "dead": (_dies, "RemoteDisconnected|BadStatusLine|IncompleteRead"),
    "truncated": (lambda h, r: send(h, b'{"result": [[]]}', length=99), "IncompleteRead"),
}


@pytest.mark.parametrize(("answer", "what"), BROKEN.values(), ids=BROKEN)
def test_what_may_pass_is_tried_again_a_bounded_number_of_times(fake, answer, what):
    retriever = fake.retriever(timeout_s=0.3, retries=2)
    fake.answer = answer
    start = time.monotonic()
    with pytest.raises(EnvironmentFault, match=what) as caught:
        retriever.search(["q"], 3)
    assert time.monotonic() - start < 3
    assert str(caught.value).startswith(f"{fake.url}: ")
    assert str(caught.value).endswith("(tried 3 times)")
    assert str(caught.value).isprintable()
    assert len(fake.requests) == 3

    fake.requests.clear()
    fake.answer = lambda h, r: (answer if len(fake.requests) < 3 else Fake.right)(h, r)
    assert _titles(retriever.search(["q"], 3)) == [["q"]]
    assert len(fake.requests) == 3


def test_one_failure_of_many_single_queries_is_a_fault(fake):
    retriever = fake.retriever(protocol="single", retries=0)
    fake.answer = lambda h, r: send(h, b"", 400) if r["query"] == "bad" else Fake.right(h, r)
    with pytest.raises(EnvironmentFault, match="HTTP 400"):
        retriever.search(["x", "bad", "y"], 1)


def test_a_server_that_dies_between_two_turns(corpus):
    with process(corpus, "--port", 0) as (server, line):
        retriever = HTTPRetriever(line.split()[-1], 5, 1)
        assert retriever.search(["otter"], 1)[0]
        server.kill()
        server.wait()
        with pytest.raises(EnvironmentFault, match=r"ConnectionRefused.*tried 2 times"):
            retriever.search(["kestrel"], 1)
        assert retriever.search(["otter"], 1)[0]  # still known


# the check before any work


def test_no_server_is_a_data_error_of_one_request():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DataError, match=f"^env.retriever_url={url}: ConnectionRefused"):
            HTTPRetriever(url, 5, 50)


def test_a_server_that_is_none_of_ours_is_a_data_error(fake):
    fake.answer = WRONG["html"][0]
    with pytest.raises(DataError, match=f"^env.retriever_url={fake.url}: not JSON"):
        HTTPRetriever(fake.url, 5, 3)
    fake.answer = BROKEN["500"][0]
    fake.requests.clear()
    with pytest.raises(DataError, match="HTTP 500"):
        HTTPRetriever(fake.url, 5, 3)
    assert len(fake.requests) == 1


def test_the_path_of_the_url_is_kept(fake):
    paths = []
    fake.answer = lambda h, r: (paths.append(h.path), Fake.right(h, r))
    for path in ("", "/", "/retrieve", "/v1/find?x=1"):
        HTTPRetriever(fake.url + path, 5, 0)
    assert paths == ["/retrieve", "/retrieve", "/retrieve", "/v1/find?x=1"]


# the suite


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"id": str(i), "question": f"Who swims {i}?", "answers": ["Otter"]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("protocol", ["batch", "single"])
def test_the_suite_sees_the_same_over_http(corpus, url, questions, protocol):
    suites = [
        SearchSuite(SearchConfig(questions=questions, corpus=str(corpus)), 0),
        SearchSuite(
            SearchConfig(
                questions=questions,
                retriever="http",
                retriever_url=url,
                retriever_protocol=protocol,
            ),
            0,
        ),
    ]
    words = ["river", "otter", "heroes song", "nothing known", "river"]
    responses = [f"<think>.</think><search>{word}</search>" for word in words]
    seen = []
    for suite in suites:
        episodes = [suite.make() for _ in words]
        for episode, task in zip(episodes, suite.tasks("train"), strict=False):
            episode.reset(task)
        seen.append(suite.step_many(episodes, responses))
    assert seen[0] == seen[1]
    assert "Doc 2(Title: " in seen[0][0].observation
    described = suites[1].describe()
    assert described["retriever_url"] == url
    assert list(described["files"]) == ["questions"]
    suites[1].close()
    with pytest.raises(EnvironmentFault, match="closed"):
        suites[1].retrieve(["otter"])


def test_a_dead_server_stops_the_run_with_its_own_words(fake, questions):
    config = SearchConfig(
        questions=questions, retriever="http", retriever_url=fake.url, retriever_retries=0
    )
    suite = SearchSuite(config, 0)
    fake.answer = BROKEN["500"][0]
    with pytest.raises(EnvironmentFault, match=rf"^{fake.url}: HTTP 500 'oh\\n'$"):
        suite.retrieve(["q"])


def test_no_server_at_the_start_of_a_run(questions, tmp_path, monkeypatch, capsys):
    from rsipo_lightning.cli import fit_main

    monkeypatch.chdir(tmp_path)
    words = f"env.questions={questions} env.retriever=http env.retriever_url={URL}"
    assert fit_main(["--algo", "grpo", "--env", "search", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rsipo-fit: error: env.retriever_url={URL}: ConnectionRefused")
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"retriever": "faiss"}, "env.retriever=faiss: must be one of bm25, disk, http"),
        ({"retriever": "http"}, "env.retriever=http needs env.retriever_url"),
        ({"retriever_url": URL, "corpus": "c"}, "set env.retriever=http"),
        ({"retriever": "http", "retriever_url": URL, "corpus": "c"}, "env.corpus is given with"),
        ({"retriever": "http", "retriever_url": URL, "questions": None}, "needs env.questions"),
        ({"retriever": "disk", "corpus": "c", "questions": None}, "needs env.questions"),
        ({"retriever": "disk"}, "without env.corpus"),
        ({"retriever": "disk", "corpus": "c", "retriever_url": URL}, "set env.retriever=http"),
        (
            {"retriever_protocol": "grpc"},
            "env.retriever_protocol=grpc: must be one of batch, single",
        ),
        ({"retriever_timeout_s": 0}, "env.retriever_timeout_s=0: must"),
        ({"retriever_timeout_s": float("nan")}, "env.retriever_timeout_s=nan: must"),
        ({"retriever_retries": -1}, "env.retriever_retries=-1: must be at least 0"),
    ],
)
def test_keys_that_cannot_be_run(keys, what):
    with pytest.raises(ConfigError, match=re.escape(what)):
        SearchSuite(SearchConfig(**{"questions": "q.jsonl", **keys}), 0)


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://h:x", "http://h:0", "http://h/a b", "é"]
)
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError, match=r"env\.retriever_url=") as caught:
        SearchSuite(SearchConfig(questions="q", retriever="http", retriever_url=url), 0)
    assert str(caught.value).isprintable()


def test_a_password_is_not_written_into_the_run():
    with pytest.raises(ConfigError) as caught:
        SearchSuite(
            SearchConfig(questions="q", retriever="http", retriever_url="http://me:secret@host"),
            0,
        )
    assert "secret" not in str(caught.value)
