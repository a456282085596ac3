"""The client of an OpenAI-compatible server against a real one that misbehaves."""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest

from rsipo_lightning import web
from rsipo_lightning.endpoint import Answer, Endpoint, EndpointConfig, asked_again
from rsipo_lightning.errors import ConfigError, DataError, EngineError
from rsipo_lightning.types import Message

KEY = "sk-secret-1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(web, "PAUSE_S", 0.01)


def endpoint(server, **keys):
    keys = {"model": "m", "retries": 2, "timeout_s": 5, **keys}
    return Endpoint(EndpointConfig(url=server.url, **keys), "sft.endpoint")


def chats(n):
    return [[Message("user", str(i))] for i in range(n)]


def test_answers_come_in_order_and_the_request_is_what_servers_expect(chat_server, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)

    def answer(handler, request):
        text = request["messages"][-1]["content"]
        time.sleep(0.05 if text == "0" else 0)  # the first one is answered last
        chat_server.say(handler, f"to {text}")

    chat_server.answer = answer
    seen = []
    got = endpoint(chat_server, key_env="MY_KEY", max_tokens=7).complete(
        chats(20), done=lambda i, answer: seen.append((i, answer.text))
    )
    assert got == [Answer(f"to {i}") for i in range(20)]
    assert sorted(seen) == [(i, f"to {i}") for i in range(20)]
    assert seen[0] != (0, "to 0")
    assert set(chat_server.paths) == {"/v1/chat/completions"}
    assert {h["Authorization"] for h in chat_server.headers} == {f"Bearer {KEY}"}
    request = next(r for r in chat_server.requests if r["messages"][0]["content"] == "3")
    assert request == {
        "model": "m",
        "messages": [{"role": "user", "content": "3"}],
        "temperature": 0.0,
        "max_tokens": 7,
    }


def test_no_more_than_so_many_at_once_and_no_key_unless_named(chat_server):
    live, most, lock = 0, 0, threading.Lock()

    def answer(handler, request):
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        time.sleep(0.02)
        with lock:
            live -= 1
        chat_server.say(handler, "x")

    chat_server.answer = answer
    endpoint(chat_server, concurrency=3).complete(chats(12))
    assert most == 3
    assert all("Authorization" not in headers for headers in chat_server.headers)


def test_an_answer_that_cannot_be_used_is_asked_for_once_more(chat_server):
    def answer(handler, request):
        chat_server.say(handler, "good" if len(request["messages"]) > 1 else "bad")

    chat_server.answer = answer

    def check(index, text):
        return "" if text == "good" and index == 0 else f"not good, {index}"

    got = endpoint(chat_server).complete(chats(2), check)
    assert got == [Answer("good"), Answer("good", "not good, 1")]
    assert len(chat_server.requests) == 4
    second = [r["messages"] for r in chat_server.requests if len(r["messages"]) == 3]
    assert {m[0]["content"] for m in second} == {"0", "1"}
    assert [m[1] for m in second] == [{"role": "assistant", "content": "bad"}] * 2
    assert all("not good" in m[2]["content"] for m in second)


def test_a_second_attempt_shows_what_was_wrong():
    said, asked = asked_again("x" * 5000 + "end", "no JSON object")
    assert (said.role, asked.role) == ("assistant", "user")
    assert said.content.endswith("xend")
    assert len(said.content) == 2000
    assert "no JSON object" in asked.content


BUSY = {
    "429": lambda s, h: s.send(h, {}, 429),
    "503 page": lambda s, h: s.send(h, b"<html>", 503),
    "slow": lambda s, h: time.sleep(0.5),
    "hangs up": lambda s, h: h.connection.close(),
}


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY)
def test_what_may_pass_is_tried_again_a_bounded_number_of_times(chat_server, busy):
    def answer(handler, request):
        if len(chat_server.requests) < 3:
            busy(chat_server, handler)
        else:
            chat_server.say(handler, "fine")

    chat_server.answer = answer
    assert endpoint(chat_server, timeout_s=0.2).complete(chats(1)) == [Answer("fine")]
    assert len(chat_server.requests) == 3

    chat_server.requests.clear()
    chat_server.answer = lambda handler, request: busy(chat_server, handler)
    with pytest.raises(EngineError, match=r"\(tried 3 times\)$"):
        endpoint(chat_server, timeout_s=0.2).complete(chats(1))
    assert len(chat_server.requests) == 3


def test_a_server_says_when_to_come_back(chat_server, monkeypatch):
    def answer(handler, request):
        if len(chat_server.requests) < 2:
            chat_server.send(handler, {}, 429, Retry_After="1")
        else:
            chat_server.say(handler, "fine")

    chat_server.answer = answer
    start = time.monotonic()
    assert endpoint(chat_server).complete(chats(1)) == [Answer("fine")]
    assert time.monotonic() - start >= 1


FATAL = {
    "401": (lambda s, h: s.send(h, {"error": "bad key"}, 401), 'HTTP 401 \'{"error": "bad key"}\''),
    "404": (lambda s, h: s.send(h, {"error": "no model"}, 404), "HTTP 404"),
    "html": (
        lambda s, h: s.send(h, b"<html>\x1b[31m\n", Content_Type="text/html"),
        "text/html came",
    ),
    "other json": (lambda s, h: s.send(h, {"choices": []}), "the answer is not {"),
    "list": (lambda s, h: s.send(h, [1]), "the answer is not {"),
    "number": (lambda s, h: s.say(h, 5), "the answer is not {"),
    "moved": (lambda s, h: s.send(h, b"", 307, Location="http://x/"), "redirects to 'http://x/'"),
}


@pytest.mark.parametrize(("fatal", "says"), FATAL.values(), ids=FATAL)
def test_what_will_not_pass_is_an_error_at_once(chat_server, fatal, says, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    chat_server.answer = lambda handler, request: fatal(chat_server, handler)
    client = endpoint(chat_server, key_env="MY_KEY")
    with pytest.raises(EngineError, match=re.escape(says)) as caught:
        client.complete(chats(1))
    with pytest.raises(DataError, match=r"^sft\.endpoint\.url=") as probed:
        client.probe()
    assert len(chat_server.requests) == 2
    for error in (caught, probed):
        assert str(error.value).isprintable()  # one line, no escape codes of the server
        assert KEY not in str(error.value)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(DataError, match="ConnectionRefused"):
            Endpoint(EndpointConfig(url, "m"), "sft.endpoint").probe()


def test_one_chat_that_is_refused_does_not_stop_the_others(chat_server):
    def answer(handler, request):
        if request["messages"][0]["content"] == "1":
            chat_server.send(handler, {"error": "too long"}, 400)
        else:
            chat_server.say(handler, "x")

    chat_server.answer = answer
    got = endpoint(chat_server).complete(chats(3))
    assert [a.text for a in got] == ["x", "", "x"]
    assert got[1].problem.startswith("refused: HTTP 400")
    assert len(chat_server.requests) == 3


def test_a_model_that_says_nothing_has_said_nothing(chat_server):
    chat_server.answer = lambda handler, request: chat_server.say(handler, None)
    assert endpoint(chat_server).complete(chats(1)) == [Answer("")]


def test_half_a_character_can_be_written_to_a_file(chat_server):
    chat_server.answer = lambda handler, request: chat_server.say(handler, "a\ud800b")
    assert endpoint(chat_server).complete(chats(1)) == [Answer("a?b")]


def test_answers_on_their_way_are_kept_when_another_fails(chat_server):
    """They are paid for. What was not sent yet is not sent any more."""

    def answer(handler, request):
        if request["messages"][0]["content"] == "0":
            time.sleep(0.1)
            chat_server.send(handler, {}, 401)
        else:
            time.sleep(0.3)
            chat_server.say(handler, "paid")

    chat_server.answer = answer
    kept = []
    with pytest.raises(EngineError, match="HTTP 401"):
        endpoint(chat_server, concurrency=3).complete(chats(30), done=lambda i, a: kept.append(i))
    assert {1, 2} <= set(kept)
    assert len(chat_server.requests) < 10


def test_pauses_do_not_grow_without_bound():
    """2.0**1024 is no float."""
    waited = []
    client = web.Client("http://127.0.0.1:1", "/", 1, EngineError)
    with pytest.raises(EngineError, match=r"tried 1101 times"):
        client.post(b"", 1100, waited.append)
    assert waited[:3] == [0.01, 0.02, 0.04]
    assert waited[-1] == max(waited) == 8


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"url": None}, "sft.endpoint.url is missing"),
        ({"model": ""}, "sft.endpoint.model is missing"),
        ({"url": "host:80"}, "sft.endpoint.url='host:80': must be http"),
        ({"url": "http://me:pw@h/v1"}, "a name or password in the url"),
        ({"key_env": "NO_SUCH_KEY"}, "key_env='NO_SUCH_KEY': the environment variable is not set"),
        ({"key_env": "BAD_KEY"}, "holds characters that no key has"),
    ],
)
def test_what_cannot_be_asked(keys, says, monkeypatch):
    monkeypatch.setenv("BAD_KEY", "sk\nx: y")
    config = EndpointConfig(**{"url": "http://h/v1", "model": "m", **keys})

    def make():
        config.check("sft.endpoint")
        Endpoint(config, "sft.endpoint")

    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        make()
    assert "pw" not in str(caught.value)
    assert "x: y" not in str(caught.value)


def test_an_answer_that_ctrl_c_met_on_its_way_to_be_kept_is_kept_after_it(chat_server):
    """It is paid for: the first call of ``done`` is broken off before it has done anything."""
    chat_server.answer = lambda handler, request: chat_server.say(handler, "yes")
    calls, kept = [], []

    def done(index, answer):
        calls.append(index)
        if len(calls) == 1:
            raise KeyboardInterrupt
        kept.append(index)

    with pytest.raises(KeyboardInterrupt):
        endpoint(chat_server, concurrency=2).complete(chats(6), done=done)
    assert calls[0] in kept
    assert len(kept) == len(set(kept))
