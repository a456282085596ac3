"""A run over ``rsipo-retriever`` in a process of its own, which dies, hangs or is replaced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rsipo_lightning.cli import fit_main
from rsipo_lightning.environments.world import World

ROOT = Path(__file__).parents[2]
SMALL = (
    "rollout.tasks=4",
    "rollout.group=4",
    "eval.episodes=0",
    "eval.every=0",
    "checkpoint.every=9",
    "env.retriever_timeout_s=0.5",
    "env.retriever_retries=2",
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in world as files."""
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path / "cache"))
    world = World(0)
    passages = [{"id": p.id, "title": p.title, "text": p.text} for p in world.passages]
    questions = [
        {"id": q.id, "question": q.text, "answers": q.answers}
        for q, _ in zip(world.questions("train"), range(200), strict=False)
    ]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@contextmanager
def server(data: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    command = [sys.executable, "-m", "rsipo_lightning.retriever_server", "--port", str(port)]
    with subprocess.Popen(
        [*command, str(data / "corpus.jsonl")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


@contextmanager
def page(port: int) -> Iterator[None]:
    """Something else that listens on the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>hello")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as other:
        Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        yield
        other.shutdown()


FAULTS = {
    "dead": r"ConnectionRefused",
    "slow": r"no whole answer within 0.5 s (tried 3 times)",
    "wrong": r"text/html came: '<html>hello'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_run_stops_with_a_checkpoint_and_goes_on(
    fault: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = data / "run"
    with server(data) as (process, port), ExitStack() as others:
        keys = (
            f"env.questions={data / 'questions.jsonl'}",
            "env.retriever=http",
            f"env.retriever_url=http://127.0.0.1:{port}",
            "trainer.updates=40",
            f"run.dir={folder}",
        )

        def break_it() -> None:
            while not (folder / "metrics.csv").exists():
                time.sleep(0.01)
            if fault == "slow":
                process.send_signal(signal.SIGSTOP)
                return
            process.kill()
            process.wait()
            if fault == "wrong":
                others.enter_context(page(port))

        Thread(target=break_it, daemon=True).start()
        assert fit_main(["--algo", "grpo", "--env", "search", *SMALL, *keys]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert FAULTS[fault] in line
    assert f"go on with: rsipo-fit --resume {folder}" in line
    made = len((folder / "metrics.csv").read_text().splitlines()) - 1
    assert 1 <= made < 40
    (kept, *_) = sorted((folder / "checkpoints").glob("*.ckpt"), reverse=True)
    assert kept.name == f"update-{made:06d}.ckpt"
    with server(data, port):
        assert fit_main(["--resume", str(folder), f"trainer.updates={made + 1}"]) == 0
