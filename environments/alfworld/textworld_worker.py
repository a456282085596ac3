"""What a worker of the textworld engine runs: the one environment of the package that it has.

Moving that environment from one live game to another costs 1 to 5 ms: Python's part of a game's
state is set aside, the planner's part (a C++ library with one global state) is made again from the
translated problem and the operators that were applied.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from rsipo_lightning.environments.alfworld.game import View

_TRANSLATIONS = 32  # games whose translation (about 5 MB each) is kept


def serve(pipe: Connection) -> None:
    """Answer ``(method, args, tokens to forget)`` with ``(refused, value)`` until the pipe ends.

    The first answer says whether the package could be loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with suppress(EOFError, ConnectionError):  # the parent is gone
        refused, games = _answer(LiveGames)
        pipe.send((refused, games if refused else None))
        while not refused:
            method, args, forgotten = pipe.recv()
            games.forget(forgotten)
            pipe.send(_answer(getattr(games, method), *args))


def _answer(call: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        return False, call(*args)
    except (Exception, SystemExit) as error:  # the translator exits at what it cannot parse
        return True, " ".join(f"{type(error).__name__}: {error}".split())


class LiveGames:
    """Live games by token, each ``(domain, grammar, problem)`` and what has happened in it."""

    def __init__(self) -> None:
        # importing alfworld makes this folder, by default in the user's home
        os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld import EnvInfos
        from textworld.envs.pddl import PddlEnv

        _parse_once()
        self._env = PddlEnv(EnvInfos(won=True, admissible_commands=True))
        self._env.downward_lib = self._planner = _Planner(self._env.downward_lib)
        self._wrapped = AlfredInfos(AlfredDemangler(self._env, shuffle=False))
        self._current: int | None = None  # the token of the game that the environment is in
        self._others: dict[int, tuple[dict[str, Any], list[tuple[int, Any]]]] = {}

    def start(self, token: int, game: tuple[str, str, str], commands: Sequence[str]) -> None:
        """Begin a game and play ``commands``."""
        self._set_aside()
        data = dict(zip(("pddl_domain", "grammar", "pddl_problem"), game, strict=True))
        try:
            if getattr(self._env, "_game_data", None) != data:
                self._wrapped.load(data)
            self._wrapped.reset()
        except BaseException:
            self._env._game_data = None  # it is half loaded
            raise
        self._current = token
        for command in commands:
            self._wrapped.step(command)

    def view(self, token: int) -> View:
        self._go_to(token)
        state = self._env.state
        return View(state.feedback, tuple(state.admissible_commands), bool(state.won))

    def step(self, token: int, command: str) -> View:
        self._go_to(token)
        self._wrapped.step(command)
        return self.view(token)

    def state_hash(self, token: int) -> str:
        """Of the facts that can change a later view: negated ones count if the grammar asks."""
        self._go_to(token)
        asked = set(re.findall(r"\bnot_\w+", self._env._game_data["grammar"]))
        facts = sorted(
            f"{fact.name}({', '.join(v.name for v in fact.arguments)})"
            for fact in self._env._pddl_state.facts
            if not fact.is_negation or fact.name in asked
        )
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def forget(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._others.pop(token, None)
            if token == self._current:
                self._current = None

    def _set_aside(self) -> None:
        if self._current is not None:
            self._others[self._current] = (dict(vars(self._env)), self._planner.applied)
            self._current = None

    def _go_to(self, token: int) -> None:
        if token == self._current:
            return
        self._set_aside()
        attributes, applied = self._others.pop(token)
        vars(self._env).update(attributes)
        self._planner.load_sas(self._env._pddl_state.sas.encode())
        for operator, effects in applied:
            self._planner.apply_operator(operator, effects())
        self._current = token


class _Planner:
    """fast-downward's library, and the operators that were applied since a problem was loaded."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.applied: list[tuple[int, Any]] = []  # (operator, type of the buffer of its effects)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def load_sas(self, sas: bytes) -> None:
        self.applied = []
        self._library.load_sas(sas)

    def load_sas_replan(self, sas: bytes) -> None:
        """Nobody asks for plans."""

    def apply_operator(self, operator: int, effects: Any) -> Any:
        self.applied.append((operator, type(effects)))
        return self._library.apply_operator(operator, effects)


def _parse_once() -> None:
    """Let the package parse and translate the same text once, and copy less.

    By itself it parses every template at every step and translates every game twice at every reset.
    """
    import fast_downward
    import textworld.logic
    from textworld.envs.pddl import logic, textgen

    translate = lru_cache(_TRANSLATIONS)(fast_downward.pddl2sas)
    # the second translation, for plans, is never used
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: (
        (None, "") if optimize else translate(domain, problem)
    )
    logic.GameLogic = lru_cache(_TRANSLATIONS)(logic.GameLogic)
    rule = textworld.logic.Rule
    rule.parse_conjunctive_query = staticmethod(lru_cache(None)(rule.parse_conjunctive_query))
    parse = lru_cache(None)(textgen._PARSER.parse)
    convert = textgen._Converter
    # converted anew each time: its symbols are changed while they are used
    textgen._parse_and_convert = lambda text, **options: convert().walk(parse(text, **options))
    # what the values of these two dictionaries say does not change
    textgen.copy_context = lambda context: {
        **context,
        "variables": dict(context["variables"]),
        "mapping": dict(context["mapping"]),
    }
