"""A retriever behind HTTP: the protocol of Search-R1's server, and what servers make of it.

``POST {"queries": [...], "topk": k, "return_scores": true}`` is answered by ``{"result": [[
{"document": {"id", "contents"}, "score"}, ...], ...]}``, one list per query. Bare documents and
documents of {id, title, text} are read too. The protocol "single" sends one ``"query"`` at a time.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from rsipo_lightning.environments.retriever import Passage, to_passage
from rsipo_lightning.errors import DataError, EnvironmentFault
from rsipo_lightning.files import parse_object
from rsipo_lightning.web import Client, Reply, excerpt, refusal

PROTOCOLS = ("batch", "single")
_AT_ONCE = 8  # requests in flight with the protocol "single"
_SHAPE = '{"result": [[{"document": {"id", "contents"}, "score"}]]}'


class HTTPRetriever:
    """Asks a server; what it said lately is kept, so repeated queries of a group cost nothing.

    What may pass (see ``web.Client``) is tried ``retries`` more times. Whatever else is wrong is an
    EnvironmentFault at once: a server that answers nonsense does so again. Constructing it sends
    one query; a server that fails it is a DataError.
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
        """``url`` has passed ``web.check_url``."""
        parts = urlsplit(url)
        path = parts.path if parts.path.strip("/") else "/retrieve"
        target = f"{path}?{parts.query}" if parts.query else path
        self.url = url
        self._client = Client(url, target, timeout_s, EnvironmentFault, max_bytes=max_bytes)
        self._retries, self._single, self._size = retries, protocol == "single", cache
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
        return self._read(self._client.post(body, retries), count, k)

    def _read(self, reply: Reply, count: int, k: int) -> list[list[Passage]]:
        if why := refusal(reply):
            raise EnvironmentFault(f"{self.url}: {why}")
        try:
            result = parse_object(reply.body, self.url).get("result")
            if self._single and isinstance(result, list):
                # Either the list of the one query or a list that holds it
                result = result if result and isinstance(result[0], list) else [result]
            if not isinstance(result, list) or not all(isinstance(row, list) for row in result):
                raise DataError(f"{self.url}: the answer is not {_SHAPE}")
            if len(result) != count:
                raise DataError(f"{self.url}: {len(result)} results for {count} queries")
            return [[self._passage(item) for item in row[:k]] for row in result]
        except DataError as error:
            kind = reply.headers.get_content_type()
            raise EnvironmentFault(f"{error}; {kind} came: {excerpt(reply.body)}") from error

    def _passage(self, item: Any) -> Passage:
        document = item.get("document", item) if isinstance(item, dict) else item
        if not isinstance(document, dict):
            raise DataError(f"{self.url}: the answer is not {_SHAPE}")
        score = item.get("score")
        if score is not None and (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or (isinstance(score, float) and not math.isfinite(score))
        ):  # then the order means nothing
            raise DataError(f"{self.url}: a score is no finite number")
        return to_passage(document, self.url)
