"""A chat model behind an OpenAI-compatible server: ``POST <url>/chat/completions``.

    endpoint = Endpoint(EndpointConfig(url="http://127.0.0.1:8000/v1", model="glm"), "sft.endpoint")
    endpoint.complete([[Message("user", "Say yes.")]])        # [Answer(text="yes", problem="")]

Source of the two attempts: methods.md section 4.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rsipo_lightning.checks import at_least, one_of, within
from rsipo_lightning.errors import ConfigError, DataError, EngineError
from rsipo_lightning.types import Message
from rsipo_lightning.web import Client, check_url, excerpt, refusal

_UNFIT = (400, 413, 422)  # a server that has answered before refuses this one chat
_TAIL = 2000  # characters of an unusable answer that the second prompt shows
_SHAPE = '{"choices": [{"message": {"content": "..."}}]}'


@dataclass
class EndpointConfig:
    """Keys of a section ``endpoint``."""

    url: str | None = None  # http://host:port/v1; /chat/completions is added
    model: str | None = None  # name that the server knows
    key_env: str | None = None  # environment variable that holds the API key; None sends no key
    temperature: float = 0.0
    max_tokens: int = 4096  # of one answer
    timeout_s: float = 120.0  # for each request
    retries: int = 8  # after a failed connection, a timeout, a 429 or a 5xx; half a minute in all
    concurrency: int = 8  # requests at the same time

    def check(self, section: str) -> None:
        """ConfigError for values out of range; ``section`` is where the keys stand."""
        within(f"{section}.temperature", self.temperature, 0, 2)
        at_least(f"{section}.max_tokens", self.max_tokens, 1)
        at_least(f"{section}.retries", self.retries, 0)
        within(f"{section}.concurrency", self.concurrency, 1, 256)
        if not 0 < self.timeout_s < 1e6:  # a socket takes no infinite one
            raise ConfigError(f"{section}.timeout_s={self.timeout_s:g}: must be above 0, below 1e6")
        if self.url is not None:
            check_url(f"{section}.url", self.url)


@dataclass
class AnalyzerConfig:
    """Keys of an algorithm that learns from hindsight skills without training who writes them."""

    analyzer: str = "policy"  # who writes them: policy | endpoint (a server)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    def __post_init__(self) -> None:
        one_of("algo.analyzer", self.analyzer, ("policy", "endpoint"))
        self.endpoint.check("algo.endpoint")
        if self.analyzer != "endpoint" and self.endpoint.url:
            raise ConfigError("algo.endpoint.url is given: set algo.analyzer=endpoint to use it")
        # beside it stands the Config of an algorithm, which may have checks of its own
        getattr(super(), "__post_init__", lambda: None)()

    @property
    def server(self) -> EndpointConfig | None:
        """The endpoint, if it writes the skills."""
        return self.endpoint if self.analyzer == "endpoint" else None


class Answer(NamedTuple):
    """What the model said to one chat."""

    text: str
    problem: str = ""  # why it cannot be used


class Endpoint:
    """Completes chats, several at a time. Constructing it sends nothing."""

    def __init__(self, config: EndpointConfig, section: str) -> None:
        """``config`` has passed its ``check(section)``. ConfigError for what is missing."""
        for name in ("url", "model"):
            if not getattr(config, name):
                raise ConfigError(f"{section}.{name} is missing: which server, which model?")
        assert config.url
        self.config, self.section = config, section
        parts = urlsplit(config.url)
        target = parts.path.rstrip("/") + "/chat/completions"
        headers = _key(config, section)
        self._client = Client(config.url, target, config.timeout_s, EngineError, headers)
        self._stopped = Event()

    def probe(self) -> None:
        """Ask for a word: a wrong address, key or model is a DataError now, not in an hour."""
        try:
            what, cause = self._ask([Message("user", "Say yes.")], retries=0).problem, None
        except EngineError as error:
            what, cause = str(error).removeprefix(f"{self.config.url}: "), error
        if what:
            raise DataError(f"{self.section}.url={self.config.url}: {what}") from cause

    def complete(
        self,
        chats: Sequence[Sequence[Message]],
        check: Callable[[int, str], str] = lambda index, text: "",
        done: Callable[[int, Answer], None] = lambda index, answer: None,
    ) -> list[Answer]:
        """One answer to each chat, same order.

        ``check(index, text)`` says why an answer cannot be used, or "": such a one is asked for a
        second time, with the reason. ``done(index, answer)`` is called in this thread for each
        answer as it comes, also for those on their way when another fails or Ctrl-C is pressed.
        EngineError: the server fails for good, or answers something that is no completion.
        """
        self._stopped.clear()
        answers: dict[int, Answer] = {}

        def take(future: Future[Answer]) -> None:
            index, answer = places[future], future.result()
            answers[index] = answer
            done(index, answer)
            del places[future]  # only now: a signal in between must lose no answer

        with ThreadPoolExecutor(self.config.concurrency) as pool:
            places = {
                pool.submit(self._answer, chat, index, check): index
                for index, chat in enumerate(chats)
            }
            try:
                for future in as_completed(list(places)):
                    take(future)
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)  # what is on its way is paid for
                for future in list(places):
                    if not future.cancelled() and future.exception() is None:
                        take(future)
                raise
        return [answers[index] for index in range(len(chats))]

    def _answer(
        self, chat: Sequence[Message], index: int, check: Callable[[int, str], str]
    ) -> Answer:
        answer = self._ask(chat, self.config.retries)
        if answer.problem or not (problem := check(index, answer.text)):
            return answer
        answer = self._ask([*chat, *asked_again(answer.text, problem)], self.config.retries)
        return Answer(answer.text, answer.problem or check(index, answer.text))

    def _ask(self, chat: Sequence[Message], retries: int) -> Answer:
        config = self.config
        request = {
            "model": config.model,
            "messages": [message._asdict() for message in chat],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        reply = self._client.post(json.dumps(request).encode(), retries, self._wait)
        why = refusal(reply)
        if reply.status in _UNFIT:
            return Answer("", f"refused: {why}")
        if not why:
            if (text := _content(reply.body)) is not None:
                return Answer(text)
            kind = reply.headers.get_content_type()
            why = f"the answer is not {_SHAPE}; {kind} came: {excerpt(reply.body)}"
        raise EngineError(f"{config.url}: {why}")

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EngineError(f"{self.config.url}: stopped")


def asked_again(text: str, problem: str) -> list[Message]:
    """What follows an answer that cannot be used (methods.md 4)."""
    return [
        Message("assistant", text[-_TAIL:]),
        Message("user", f"That cannot be used: {problem}. Give only what was asked for."),
    ]


def _key(config: EndpointConfig, section: str) -> dict[str, str]:
    """The header with the key, which stands in no file and no message."""
    if config.key_env is None:
        return {}
    key = os.environ.get(config.key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        what = "holds characters that no key has" if key else "is not set"
        name = config.key_env
        raise ConfigError(f"{section}.key_env={name!a}: the environment variable {what}")
    return {"Authorization": f"Bearer {key}"}


def _content(body: bytes) -> str | None:
    """The text of a completion: "" where the model said nothing, None if it is no completion.

    Half a character, which no file and no tokenizer takes, becomes "?".
    """
    try:
        reply: Any = json.loads(body)
        message = reply["choices"][0]["message"]
        content = message.get("content")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(content, str):
        return "" if content is None else None
    return content.encode("utf-8", "replace").decode()
