"""``rsipo-retriever CORPUS``: search over a corpus file, served to others by HTTP.

``POST /retrieve`` speaks the protocol of ``environments/http_retriever.py``, ``GET /health`` says
how many passages there are. Nobody is asked for a password: serve where you trust the network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any

from rsipo_lightning.cli import Parser, guard
from rsipo_lightning.environments.retriever import LocalRetriever, Passage
from rsipo_lightning.environments.retrievers import LOCAL, open_corpus
from rsipo_lightning.errors import ConfigError, DataError
from rsipo_lightning.files import parse_object

_MAX_BYTES = 16 << 20  # of a request
_TOPK = 3  # where a request names none, as Search-R1's server


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns the exit code: 2 if it cannot start."""
    return guard("rsipo-retriever", _serve, sys.argv[1:] if argv is None else list(argv))


def _serve(argv: list[str]) -> int:
    parser = Parser(
        "rsipo-retriever",
        allow_abbrev=False,
        description="Serve a corpus by HTTP for env.retriever=http.",
        epilog="example: rsipo-retriever CORPUS.jsonl --port 8000",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address (default: 127.0.0.1)")
    add("--port", default=8000, type=int, metavar="P", help="default: 8000; 0 takes a free one")
    add("--topk-max", default=100, type=int, metavar="K", help="most passages a query gets")
    add("--index", default="bm25", choices=LOCAL, help="as env.retriever (default: bm25)")
    add("corpus", metavar="CORPUS", help="as env.corpus: JSONL of passages, or a disk index")
    args = parser.read(argv)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: must be 0 to 65535")
    if args.topk_max < 1:
        raise ConfigError(f"--topk-max {args.topk_max}: must be at least 1")
    try:
        # The port before the corpus, whose index may take minutes
        with RetrieverServer(args.host, args.port, args.topk_max) as server:
            count = server.serve(open_corpus(args.corpus, args.index))
            host, port = server.server_address[:2]
            print(f"serving {count:,} passages on http://{host!s}:{port}", flush=True)
            server.serve_forever()
    except OSError as error:
        raise ConfigError(f"--host {args.host} --port {args.port}: {error.strerror}") from error
    return 0


class RetrieverServer(ThreadingTCPServer):
    """Takes the port when it is made; answers once it was given a retriever."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, topk_max: int) -> None:
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.topk_max = topk_max
        self._retriever: LocalRetriever | None = None
        self._lock = Lock()  # a stemmer serves one thread at a time
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    def serve(self, retriever: LocalRetriever) -> int:
        """Listen from now on: until then clients are refused at once. Returns the passages."""
        self._retriever = retriever
        self.server_activate()
        return len(retriever)

    def health(self) -> dict[str, Any]:
        """What GET /health says."""
        assert self._retriever
        return {"status": "ok", "passages": len(self._retriever)}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a request. One that is not of the protocol: DataError."""
        assert self._retriever
        queries = [request["query"]] if "query" in request else request.get("queries")
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            raise DataError('"queries" must be a list of texts, or "query" one text')
        k = request.get("topk", _TOPK)
        if type(k) is not int or not 1 <= k <= self.topk_max:
            raise DataError(f'"topk" must be a whole number from 1 to {self.topk_max}')
        scores = request.get("return_scores", True)
        if not isinstance(scores, bool):
            raise DataError('"return_scores" must be true or false')
        with self._lock:
            found = self._retriever.scored(queries, k)
        if scores:
            return {"result": [[{"document": _row(p), "score": s} for p, s in f] for f in found]}
        return {"result": [[_row(p) for p, _ in f] for f in found]}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; any other error is printed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _row(passage: Passage) -> dict[str, str]:
    """Contents for most clients; title and text for ours, since a title may hold quotes."""
    contents = f"{passage.title}\n{passage.text}"
    return {
        "id": passage.id,
        "contents": contents,
        "title": passage.title,
        "text": passage.text,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds a connection may be silent
    disable_nagle_algorithm = True  # head and body are two writes
    server: RetrieverServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, self.server.health())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or float(length) > _MAX_BYTES:  # int takes 4,300 digits
            return self.send_error(400, f"Content-Length must be 0 to {_MAX_BYTES}")
        body = self.rfile.read(int(length))
        if self.path != "/retrieve":
            return self.send_error(404)
        try:
            answer = self.server.answer(parse_object(body, "the request"))
        except DataError as error:
            return self.send_error(400, str(error))
        self._send(200, answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors are JSON too; the rest of the connection cannot be trusted."""
        self.close_connection = True
        what = message or "POST /retrieve and GET /health are all there is"
        self._send(int(code), {"error": what})

    def _send(self, code: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer, ensure_ascii=False).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line per request would drown the one that matters."""


if __name__ == "__main__":
    sys.exit(main())
