"""POST requests that end: bounded time, bounded size, bounded retries, errors in one line."""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rsipo_lightning.errors import ConfigError, RsipoError

PAUSE_S = 0.25  # before the first retry; each further one waits twice as long, 8 s at most
MAX_WAIT_S = 60.0  # for a server that says when to come back
BUSY = (408, 429)  # and every 5xx: may pass, so they are tried again


class Reply(NamedTuple):
    """What a server answered."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Client:
    """Posts bodies to one address; may be used by several threads at once.

    Failed connections, timeouts and BUSY replies are tried again. ``fault`` is the error that is
    raised when that does not help; any other reply is returned, whatever its status.
    """

    def __init__(
        self,
        url: str,
        target: str,
        timeout_s: float,
        fault: type[RsipoError],
        headers: Mapping[str, str] | None = None,
        max_bytes: int = 64 << 20,
    ) -> None:
        """``url`` has passed :func:`check_url`; ``target`` is the path and query to post to."""
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = parts.scheme == "https"
        self._target, self._timeout_s, self._fault = target, timeout_s, fault
        fixed = {"Content-Type": "application/json", "Connection": "close"}
        self._headers = {**fixed, **(headers or {})}
        self._max_bytes = max_bytes

    def post(
        self, body: bytes, retries: int, sleep: Callable[[float], object] | None = None
    ) -> Reply:
        """The reply to ``body``. ``sleep`` waits before a retry, and may raise to give up."""
        for tried in range(retries + 1):
            asked_s = 0.0
            try:
                reply = self._post(body)
            except TimeoutError:
                what = f"no whole answer within {self._timeout_s:g} s"
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            else:
                if reply.status < 500 and reply.status not in BUSY:
                    return reply
                what = f"HTTP {reply.status} {excerpt(reply.body)}"
                after = reply.headers.get("Retry-After", "")
                asked_s = min(float(after), MAX_WAIT_S) if after.isdecimal() else 0.0
            if tried < retries:
                pause_s = min(PAUSE_S * 2 ** min(tried, 16), 8)  # 2**1024 is no float
                (sleep or time.sleep)(max(asked_s, pause_s))
        times = "" if retries == 0 else f" (tried {retries + 1} times)"
        raise self._fault(f"{self.url}: {what}{times}")

    def _post(self, body: bytes) -> Reply:
        """One request on a connection of its own.

        A kept one would save about 1 ms, but servers close it between two turns (uvicorn: 5 s).
        """
        end = time.monotonic() + self._timeout_s
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        connection.response_class = partial(_Response, end)  # type: ignore[assignment]
        try:
            connection.request("POST", self._target, body, self._headers)
            with connection.getresponse() as response:
                answer = bytearray()
                while part := response.read1(1 << 16):
                    answer += part
                    if len(answer) > self._max_bytes:
                        raise self._fault(
                            f"{self.url}: the answer is larger than {self._max_bytes:,} bytes"
                        )
                declared = response.getheader("Content-Length") or ""
                if declared.isdecimal() and len(answer) < float(declared):  # int: 4,300 digits
                    raise http.client.IncompleteRead(bytes(answer))
                return Reply(response.status, response.headers, bytes(answer))
        finally:
            connection.close()


class _Response(http.client.HTTPResponse):
    """A response, headers and all, that has come by ``end``: a server may drip or say 100 for ever,
    and the timeout of a socket is for each read.
    """

    def __init__(self, end: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_Until(sock, end))


class _Until(io.RawIOBase):
    """Reads of a socket that end together."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def refusal(reply: Reply) -> str:
    """Why a reply is no answer, "" if its status is 200. Redirects are not followed."""
    if 300 <= reply.status < 400:
        to = excerpt(reply.headers.get("Location", "").encode())
        return f"HTTP {reply.status}, redirects to {to}: not followed"
    return "" if reply.status == 200 else f"HTTP {reply.status} {excerpt(reply.body)}"


def check_url(key: str, url: str) -> None:
    """ConfigError unless ``url``, the value of ``key``, is a plain http(s) address."""
    where = f"{key}={url!a}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: must be http://host[:port][/path] or https://...")
    if "@" in parts.netloc:  # it would stand in config.yaml and run.json
        raise ConfigError(f"{key}: a name or password in the url is not supported")


def excerpt(answer: bytes) -> str:
    """The start of an answer, escaped: data of a server must not write lines into a terminal."""
    text = answer[:400].decode(errors="replace")
    return ascii(text[:100] + ("..." if len(answer) > 100 else ""))
