"""The game engine of the alfworld package, in processes of its own. Needs the extra ``alfworld``.

The package breaks in threads, changes ``sys.argv`` and ``sys.stdout`` and may hang or die in C++:
none of it happens in this process. One environment of the package plays all games of a worker.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from importlib.util import find_spec
from typing import Any, Self

from rsipo_lightning.checks import above, at_least
from rsipo_lightning.environments.alfworld.game import Game, View
from rsipo_lightning.environments.alfworld.textworld_worker import serve
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault, RsipoError

_START_S = 120.0  # for a worker to import the package
_STARTS = 3  # tries in a row
_tokens = itertools.count()
_counting = threading.Lock()  # for live and forgotten of all workers


class GameError(RsipoError, RuntimeError):
    """The worker that played a game hung or died, or the package raised: ends this episode only."""


class TextWorldEngine:
    """Opens games in ``workers`` processes; a call that takes longer than ``timeout_s`` s fails.

    A worker that hangs or dies is replaced, and its other games go on where they were. May be used
    by several threads; games of different workers then move at the same time.
    """

    def __init__(self, workers: int = 1, timeout_s: float = 60.0) -> None:
        """Start the workers. ConfigError without the extra, or if the package cannot be loaded."""
        at_least("workers", workers, 1)
        above("timeout_s", timeout_s, 0)
        check_installed()
        self._workers = [_Worker(timeout_s) for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.start()
        except EnvironmentFault as error:
            self.close()
            raise ConfigError(f"{error} (or env.engine=builtin, which needs no package)") from error

    def open(self, game: Game) -> TextWorldGame:
        """A live game that has been reset. DataError for a game that cannot be loaded, GameError if
        the worker hangs or dies over it.
        """
        with _counting:
            worker = min(self._workers, key=lambda worker: worker.live)
            played = TextWorldGame(worker, game)
        try:
            played.reset()
        except BaseException:
            played.close()
            raise
        return played

    def close(self) -> None:
        """End the workers. May be called twice."""
        for worker in self._workers:
            worker.closed = True
            worker.stop()


class TextWorldGame:
    """One live game: the commands so far, from which any worker process gets to its state."""

    view: View

    def __init__(self, worker: _Worker, game: Game) -> None:
        self._worker = worker
        self._game = game
        self._commands: list[str] = []
        self._token = next(_tokens)
        self._process = 0  # the process of the worker that knows this game
        self._closed = False
        worker.live += 1

    def reset(self) -> View:
        """Back to the start: always the same view."""
        self._commands, self._process = [], 0
        self.view = self._ask("view")
        return self.view

    def step(self, command: str) -> View:
        """One command. GameError if the worker hangs or dies, or the package raises; the game then
        stays as it was.
        """
        self.view = self._ask("step", command)
        self._commands.append(command)
        return self.view

    def clone(self) -> Self:
        """An independent copy, which replays the commands so far when it is first used."""
        with _counting:
            copy = type(self)(self._worker, self._game)
        copy._commands, copy.view = list(self._commands), self.view
        return copy

    def state_hash(self) -> str:
        """SHA-256 of the facts that hold."""
        return str(self._ask("state_hash"))

    def close(self) -> None:
        """Forget the game. May be called twice."""
        with _counting:
            if not self._closed:
                self._closed = True
                self._worker.live -= 1
                self._worker.forgotten.append(self._token)

    def _ask(self, method: str, *args: Any) -> Any:
        if self._closed or self._worker.closed:
            raise GameError(f"{self._game.id}: the game has been closed")
        with self._worker.lock:
            if self._process != self._worker.running():
                game = (self._game.domain, self._game.grammar, self._game.problem)
                try:
                    self._worker.call("start", self._token, game, self._commands)
                except _Refused as error:
                    raise DataError(f"{self._game.id}: cannot be loaded ({error})") from error
                except _Lost as error:
                    raise GameError(f"{self._game.id}: {error} while loading it") from error
                self._process = self._worker.number
            try:
                return self._worker.call(method, self._token, *args)
            except (_Refused, _Lost) as error:
                self._process = 0  # what the command did is undone by the replay
                at = f" at {args[0]!r}" if args else ""
                raise GameError(f"{self._game.id}: {error}{at}") from error


class _Refused(Exception):
    """The package raised; its words."""


class _Lost(Exception):
    """The worker did not answer."""


class _Worker:
    """A process that answers one call after the other, and its successors. Hold ``lock`` to call.

    ``number`` tells the processes of all workers apart; 0 is none.
    """

    _numbers = itertools.count(1)

    def __init__(self, timeout_s: float) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.closed = False
        self.live = 0  # games
        self.forgotten: list[int] = []  # tokens of closed games that the process still holds
        self._timeout_s = timeout_s
        self._process: Any = None
        self._pipe: Any = None

    def start(self) -> None:
        """EnvironmentFault if no process comes up, several times in a row."""
        context = multiprocessing.get_context("spawn")
        for _ in range(_STARTS):
            self._pipe, end = context.Pipe()
            self._process = context.Process(target=serve, args=(end,), daemon=True)
            self._process.start()
            end.close()
            try:
                self._receive(_START_S)
                self.number = next(self._numbers)
                return
            except (_Refused, _Lost) as error:
                self.stop()
                reason = error
        raise EnvironmentFault(f"the engine of the alfworld package cannot be started: {reason}")

    def running(self) -> int:
        """The number of a process that lives, a new one if need be."""
        if not (self._process and self._process.is_alive()):
            self.stop()
            self.start()
        return self.number

    def call(self, method: str, *args: Any) -> Any:
        with _counting:
            forgotten, self.forgotten = self.forgotten, []
        return self._receive(self._timeout_s, (method, args, forgotten))

    def _receive(self, timeout_s: float, request: Any = None) -> Any:
        """Send and receive with a limit on both; whatever goes wrong, the process ends."""
        late, process = threading.Event(), self._process

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            if request is not None:
                self._pipe.send(request)
            refused, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.stop()
            what = f"gave no answer within {timeout_s:g} s" if late.is_set() else "died"
            raise _Lost(f"its worker {what}") from error
        except BaseException:  # Ctrl-C: what it will still say answers no later call
            self.stop()
            raise
        finally:
            timer.cancel()
        if refused:
            raise _Refused(value)
        return value

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process, self.number = None, 0


def check_installed() -> None:
    """ConfigError if the extra ``alfworld`` is missing."""
    packages = ("alfworld", "textworld", "fast_downward")
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"env.engine=textworld needs {', '.join(missing)}: "
            "pip install 'rsipo-lightning[alfworld]' (or env.engine=builtin)"
        )
