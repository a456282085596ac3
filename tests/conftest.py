"""No test may reach for a hub: set before anything imports transformers. A fake chat server."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("ALFWORLD_DATA", None)  # games of this machine are not those of the tests


class ChatServer:
    """An OpenAI-compatible server; ``answer(handler, request)`` decides how it (mis)behaves."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler, dict[str, Any]], None] = (
            lambda handler, request: self.say(handler, "yes")
        )
        lock, server = Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.requests.append(request)
                    server.headers.append(dict(self.headers))
                    server.paths.append(self.path)
                server.answer(self, request)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]  # hang-ups
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @classmethod
    def say(cls, handler: BaseHTTPRequestHandler, text: Any) -> None:
        cls.send(handler, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    @staticmethod
    def send(handler: BaseHTTPRequestHandler, body: Any, status: int = 200, **headers: str) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """Lightning leaves its handler behind where a callback's ``on_exception`` raises."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
