"""A retriever behind HTTP: the protocol of Search-R1's server, and what servers make of it.

``POST {"queries": [...], "topk": k, "return_scores": true}`` is answered by ``{"result": [[
{"document": {"id", "contents"}, "score"}, ...], ...]}``, one list per query. Bare documents and
documents of {id, title, text} are read too. The protocol "single" sends one ``"query"`` at a time.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from rsipo_lightning.environments.retriever import Passage, parse_object, to_passage
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault

PROTOCOLS = ("batch", "single")
PAUSE_S = 0.25  # before the first retry; each further one waits twice as long, 8 s at most
_AT_ONCE = 8  # requests in flight with the protocol "single"
_SHAPE = '{"result": [[{"document": {"id", "contents"}, "score"}]]}'


class HTTPRetriever:
    """Asks a server; what it said lately is kept, so repeated queries of a group cost nothing.

    Failed connections, timeouts and 5xx are tried ``retries`` more times. Whatever else is wrong
    is an EnvironmentFault at once: a server that answers nonsense does so again. Constructing it
    sends one query; a server that fails it is a DataError.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        retries: int,
        protocol: str = "batch",
        max_bytes: int = 64 << 20,
        cache: int = 20_000,
    ) -> None:
        check_url(url)
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = parts.scheme == "https"
        path = parts.path if parts.path.strip("/") else "/retrieve"
        self._target = f"{path}?{parts.query}" if parts.query else path
        self._timeout_s, self._retries = timeout_s, retries
        self._single = protocol == "single"
        self._max_bytes, self._size = max_bytes, cache
        self._cache: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        try:
            self._ask(["river"], 1, retries=0)
        except EnvironmentFault as error:
            what = str(error).removeprefix(f"{url}: ")
            raise DataError(f"env.retriever_url={url}: {what}") from error

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Up to ``k`` passages for each query. A server that fails: EnvironmentFault."""
        if k < 1:
            return [[] for _ in queries]
        found = {query: self._cache.get((query, k)) for query in queries}
        missing = [query for query, passages in found.items() if passages is None]
        if missing:
            found.update(zip(missing, self._ask(missing, k, self._retries), strict=True))
        for query, passages in found.items():
            assert passages is not None
            self._cache[query, k] = passages
            self._cache.move_to_end((query, k))
        while len(self._cache) > self._size:
            self._cache.popitem(last=False)
        return [list(found[query] or ()) for query in queries]

    def _ask(self, queries: list[str], k: int, retries: int) -> list[list[Passage]]:
        """The passages of each query, in one request or in one for each."""
        if not self._single:
            return self._request({"queries": queries}, len(queries), k, retries)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = [pool.submit(self._request, {"query": q}, 1, k, retries) for q in queries]
            try:
                return [request.result()[0] for request in asked]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # the first failure is enough
                raise

    def _request(
        self, query: dict[str, Any], count: int, k: int, retries: int
    ) -> list[list[Passage]]:
        body = json.dumps({**query, "topk": k, "return_scores": True}).encode()
        for tried in range(retries + 1):
            if tried:
                time.sleep(min(PAUSE_S * 2 ** (tried - 1), 8))
            try:
                status, headers, answer = self._post(body)
            except TimeoutError:
                what = f"no whole answer within {self._timeout_s:g} s"
                continue
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                continue
            if status < 500:
                return self._read(status, headers, answer, count, k)
            what = f"HTTP {status} {_excerpt(answer)}"
        times = "" if retries == 0 else f" (tried {retries + 1} times)"
        raise EnvironmentFault(f"{self.url}: {what}{times}")

    def _post(self, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of one request on a connection of its own.

        A kept one would save about 1 ms, but servers close it between two turns (uvicorn: 5 s).
        """
        end = time.monotonic() + self._timeout_s
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            sock = connection.sock  # http.client forgets it when the server will close
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", self._target, body, headers)
            with connection.getresponse() as response:
                answer = bytearray()
                while True:
                    # The timeout of a socket is for each read: a server that drips needs this one.
                    if (left := end - time.monotonic()) <= 0:
                        raise TimeoutError
                    sock.settimeout(left)
                    part = response.read1(1 << 16)
                    answer += part
                    if len(answer) > self._max_bytes:
                        raise EnvironmentFault(
                            f"{self.url}: the answer is larger than {self._max_bytes:,} bytes"
                        )
                    if not part:
                        break
                declared = response.getheader("Content-Length") or ""
                if declared.isdecimal() and len(answer) < int(declared):
                    raise http.client.IncompleteRead(bytes(answer), int(declared) - len(answer))
                return response.status, response.headers, bytes(answer)
        finally:
            connection.close()

    def _read(
        self, status: int, headers: http.client.HTTPMessage, answer: bytes, count: int, k: int
    ) -> list[list[Passage]]:
        if 300 <= status < 400:
            to = _excerpt(headers.get("Location", "").encode())
            raise EnvironmentFault(f"{self.url}: HTTP {status}, redirects to {to}: not followed")
        if status != 200:
            raise EnvironmentFault(f"{self.url}: HTTP {status} {_excerpt(answer)}")
        try:
            result = parse_object(answer, self.url).get("result")
            if self._single and isinstance(result, list):
                # Either the list of the one query or a list that holds it
                result = result if result and isinstance(result[0], list) else [result]
            if not isinstance(result, list) or not all(isinstance(row, list) for row in result):
                raise DataError(f"{self.url}: the answer is not {_SHAPE}")
            if len(result) != count:
                raise DataError(f"{self.url}: {len(result)} results for {count} queries")
            return [[self._passage(item) for item in row[:k]] for row in result]
        except DataError as error:
            kind = headers.get_content_type()
            raise EnvironmentFault(f"{error}; {kind} came: {_excerpt(answer)}") from error

    def _passage(self, item: Any) -> Passage:
        document = item.get("document", item) if isinstance(item, dict) else item
        if not isinstance(document, dict):
            raise DataError(f"{self.url}: the answer is not {_SHAPE}")
        score = item.get("score")
        if isinstance(score, float) and not math.isfinite(score):  # then the order means nothing
            raise DataError(f"{self.url}: a score is {score}")
        return to_passage(document, self.url)


def check_url(url: str) -> None:
    """ConfigError unless ``url`` is a plain http(s) address."""
    where = f"env.retriever_url={url!a}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: must be http://host[:port][/path] or https://...")
    if "@" in parts.netloc:  # it would stand in config.yaml and run.json
        raise ConfigError("env.retriever_url: a name or password in the url is not supported")


def _excerpt(answer: bytes) -> str:
    """The start of an answer, escaped: data of a server must not write lines into a terminal."""
    text = answer[:400].decode(errors="replace")
    return ascii(text[:100] + ("..." if len(answer) > 100 else ""))
