"""Files and servers that are not what was promised: one line with the place, nothing written."""

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rsipo_lightning.cli import fit_main

GOOD = b'{"id": "1", "question": "Who leads Oz?", "answers": ["Ada"]}\n'
OTHER = b'{"id": "2", "question": "Whom does Ada lead?", "answers": ["Oz"]}\n'
PAGE = b'{"id": "p", "title": "Oz", "text": "Oz is led by Ada."}\n'
WORDS = ["--algo", "grpo", "--env", "search", "env.questions=q.jsonl", "env.eval_questions=e.jsonl"]
SMALL = ["trainer.updates=2", "rollout.tasks=1", "rollout.group=4", "eval.every=0"]
SMALL += ["eval.episodes=0", "log.progress=false"]


@pytest.fixture(autouse=True)
def _files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good files in the working directory; a test spoils one. Indexes are kept elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path_factory.mktemp("cache")))
    for name, content in (("q", GOOD), ("e", OTHER), ("c", PAGE)):
        Path(f"{name}.jsonl").write_bytes(content)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    def call(*more: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it would be a second line
            assert fit_main([*WORDS, *SMALL, *more]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert line.startswith("rsipo-fit: error: ")
        assert len(line) < 400
        assert out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return call


QUESTIONS = [
    (b"", "q.jsonl: holds no questions"),
    (b"\n \n", "q.jsonl: holds no questions"),
    (GOOD + b"{'id': 2}\n", "q.jsonl:2: not JSON"),
    (GOOD + GOOD[:20], "q.jsonl:2: not JSON"),
    (GOOD + b"[1]\n", "q.jsonl:2: a JSON object is expected, not list"),
    (GOOD + b"\xff\xfe\n", "q.jsonl:2: not "),
    (GOOD + b'{"question": "caf\xe9", "answers": ["x"]}\n', "q.jsonl:2: not UTF-8"),
    (GOOD + b"\x00" * 9 + b"\n", "q.jsonl:2: not "),
    (GOOD + b"{" + b"x" * 10_000_000, "q.jsonl:2: not JSON"),
    ("".join(map(chr, GOOD)).encode("utf-16"), "q.jsonl:1: not "),
    (GOOD + b'{"answers": ["x"]}\n', "q.jsonl:2: field 'question'"),
    (GOOD + b'{"question": "", "answers": ["x"]}\n', "q.jsonl:2: field 'question'"),
    (GOOD + b'{"question": ["Who?"], "answers": ["x"]}\n', "q.jsonl:2: field 'question'"),
    (GOOD + b'{"question": "Who?"}\n', "q.jsonl:2: field 'answers'"),
    (GOOD + b'{"question": "Who?", "answers": []}\n', "q.jsonl:2: field 'answers'"),
    (GOOD + b'{"question": "Who?", "answers": "Ada"}\n', "q.jsonl:2: field 'answers'"),
    (GOOD + b'{"question": "Who?", "answers": [null]}\n', "q.jsonl:2: field 'answers'"),
    (b'{"question": "Who?", "answers": ["the", "--"]}\n', "q.jsonl: holds no questions that can"),
    (b'{"question": "Who?", "answers": [""]}\n', "q.jsonl: holds no questions that can be answ"),
    (GOOD + GOOD, "q.jsonl:2: id '1' is also at q.jsonl:1"),
]
CORPORA = [
    (b"", "c.jsonl: holds no passages"),
    (b'{"id": "p", "title": "", "text": "?"}\n', "c.jsonl: holds no words that can be searched"),
    (PAGE + b"{\n", "c.jsonl:2: not JSON"),
    (PAGE + b'{"id": "p2", "title": "\xff", "text": "x"}\n', "c.jsonl:2: not UTF-8"),
    (PAGE + b'{"id": "p2", "text": "x"}\n', "c.jsonl:2: field 'title' is missing"),
    (PAGE + b'{"title": "T", "text": "x"}\n', "c.jsonl:2: field 'id' is missing"),
    (PAGE + b'{"id": "p2", "title": "T", "text": 1}\n', "c.jsonl:2: field 'text' must be text"),
    (PAGE + b"\x00\n", "c.jsonl:2: not JSON"),
]


@pytest.mark.parametrize(("content", "expected"), QUESTIONS)
def test_questions(content: bytes, expected: str, says: Callable[..., str]) -> None:
    Path("q.jsonl").write_bytes(content)
    assert expected in says("env.corpus=c.jsonl")


@pytest.mark.parametrize(("content", "expected"), CORPORA)
def test_a_corpus(content: bytes, expected: str, says: Callable[..., str]) -> None:
    Path("c.jsonl").write_bytes(content)
    assert expected in says("env.corpus=c.jsonl")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["env.corpus=nope.jsonl"], "nope.jsonl: cannot be read (No such file or directory)"),
        (["env.corpus=."], ".: cannot be read (Is a directory)"),
        (["env.corpus=c.jsonl", "env.questions=/dev/fd"], "/dev/fd: holds no *.jsonl"),
        (["env.corpus=c.jsonl", "env.questions=nope"], "nope: cannot be read (No such file"),
        ([], "env.questions is given without env.corpus"),
        (["env.corpus=c.jsonl", "rollout.tasks=2"], "rollout.tasks=2: there are only 1 training"),
    ],
)
def test_files_that_are_none(words: list[str], expected: str, says: Callable[..., str]) -> None:
    assert expected in says(*words)


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    for name in ("q", "e", "c"):
        file = Path(f"{name}.jsonl")
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert fit_main([*WORDS, *SMALL, "env.corpus=c.jsonl", "run.dir=run"]) == 0
    data = json.loads(Path("run/run.json").read_text())["data"]
    assert (data["passages"], data["tasks"]["train"]) == (1, 1)


class Server:
    """Answers like Search-R1's until ``lies``."""

    def __init__(self) -> None:
        self.lies = b""
        self.after = 0  # requests that are answered truly
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                document = {"document": {"id": "p", "contents": '"Oz"\nOz is led by Ada.'}}
                true = json.dumps({"result": [[document] for _ in asked["queries"]]}).encode()
                outer.after -= 1
                body = true if outer.after >= 0 else outer.lies
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


LIES = [b"<html>hello</html>", b'{"result": []}', b'{"result": [[{"document": {}}]]}', b""]


@pytest.mark.parametrize("lie", LIES)
def test_a_retriever_that_lies_at_the_start(
    lie: bytes, server: Server, says: Callable[..., str]
) -> None:
    server.lies = lie
    line = says("env.retriever=http", f"env.retriever_url={server.url}")
    assert f"env.retriever_url={server.url}" in line


def test_a_retriever_that_is_not_there(server: Server, says: Callable[..., str]) -> None:
    server.server.shutdown()
    server.server.server_close()
    assert server.url in says("env.retriever=http", f"env.retriever_url={server.url}")


def test_a_retriever_that_begins_to_lie(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Work had started: 75, a checkpoint, and how to go on. No reward of 0 for its lies."""
    server.lies, server.after = LIES[0], 2
    argv = [*WORDS, *SMALL, "env.retriever=http", f"env.retriever_url={server.url}", "run.dir=run"]
    assert fit_main(argv) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert server.url in line
    assert "checkpoint: run/checkpoints/update-00000" in line
    assert line.endswith("go on with: rsipo-fit --resume run")
    server.after = 10**6
    assert fit_main(["--resume", "run"]) == 0
