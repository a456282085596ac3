"""Speed and memory of the game engines of ALFWorld.

    python benchmarks/alfworld_engines.py --data ../shared/data/alfworld/games.jsonl.xz

Both play the same commands, 30 in each game: its walkthrough among random admissible ones. A step
includes the list of admissible commands; a reset is that of a game which has been loaded. The
package's own engine is measured if the extra ``alfworld`` is installed, with one worker process and
on fewer games. Each engine runs in a process of its own; times and memory include its children.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.game import Game, GameEngine
from rsipo_lightning.environments.alfworld.games import open_games

STEPS, RESETS = 30, 5  # of each game


def family() -> list[Path]:
    """The folders in /proc of this process and its children."""
    tasks = Path("/proc/self/task").glob("*/children")
    children = " ".join(task.read_text() for task in tasks).split()
    return [Path("/proc") / pid for pid in ("self", *children)]


def cpu() -> float:
    """CPU seconds so far."""
    ticks = 0
    for process in family():
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> float:
    """MiB in use, without mapped files."""
    found = [
        re.search(r"RssAnon:\s*(\d+)", (process / "status").read_text()) for process in family()
    ]
    return sum(int(one[1]) for one in found if one) / 1024


class Clock:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Clock:
        self.wall, self.cpu = -time.perf_counter(), -cpu()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += cpu()

    def ms(self, times: int) -> list[float]:
        """[wall, CPU] milliseconds each time."""
        return [1000 * self.wall / times, 1000 * self.cpu / times]


def commands(game: Game) -> list[str]:
    """What is played in a game."""
    live, walk, rng = BuiltinEngine().open(game), list(game.walkthrough), random.Random(game.id)
    played: list[str] = []
    for _ in range(STEPS):
        go_on = walk and rng.random() < 0.5
        played.append(walk.pop(0) if go_on else rng.choice(live.view.admissible))
        live.step(played[-1])
    return played


def make(engine: str) -> GameEngine:
    """An engine by the name that ``env.engine`` has."""
    if engine == "builtin":
        return BuiltinEngine()
    from rsipo_lightning.environments.alfworld.textworld import TextWorldEngine

    return TextWorldEngine()


def measure(name: str, data: str, count: int, repeats: int) -> dict[str, Any]:
    """Everything about one engine, in this process."""
    games = open_games(data)
    entries = games.entries[:: max(1, len(games.entries) // count)][:count]
    played = [commands(games.read(entry)) for entry in entries]
    before = memory()
    engine = make(name)
    with Clock() as load:
        live = [engine.open(games.read(entry)) for entry in entries]
    with Clock() as reset:
        for one in live:
            for _ in range(RESETS * repeats):
                one.reset()
    with Clock() as step:
        for _ in range(repeats):
            for one, line in zip(live, played, strict=True):
                one.reset()
                for command in line:
                    one.step(command)
    resets = repeats * RESETS * len(live)
    steps = repeats * STEPS * len(live)
    done = {
        "games": len(live),
        "load_ms": load.ms(len(live)),
        "reset_ms": reset.ms(resets),
        "steps": steps,
        "step_ms": step.ms(steps),
        "mib": memory() - before,
    }
    engine.close()
    return done


def table(done: dict[str, dict[str, Any]]) -> Table:
    """One row for each engine."""
    shown = Table(title="Game engines of ALFWorld, one process (CPU time; wall time in brackets)")
    columns = ("engine", "load ms", "reset ms", "step ms", "steps/s", "MiB", "live games")
    for name in columns:
        shown.add_column(name, justify="right")
    for engine, one in done.items():
        times = [f"{one[key][1]:.3f} ({one[key][0]:.3f})" for key in ("load_ms", "reset_ms")]
        wall, cpu = one["step_ms"]
        shown.add_row(
            engine,
            *times,
            f"{cpu:.3f} ({wall:.3f})",
            f"{1000 / cpu:,.0f} ({1000 / wall:,.0f})",
            f"{one['mib']:.1f}",
            str(one["games"]),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each engine and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path("../shared/data/alfworld/games.jsonl.xz")
    parser.add_argument("--data", default=str(shared), help="games (default: %(default)s)")
    parser.add_argument("--games", type=int, default=64, help="of the built-in engine (64)")
    parser.add_argument("--repeats", type=int, default=50, help="of its games (50)")
    parser.add_argument("--textworld-games", type=int, default=4, help="0: leave it out (4)")
    parser.add_argument("--out", type=Path, default=Path("runs/alfworld.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what a process of its own does
    args = parser.parse_args(arguments)
    if args.measure:
        print(json.dumps(measure(args.measure, args.data, args.games, args.repeats)))
        return
    todo = {"builtin": (args.games, args.repeats)}
    if find_spec("textworld") and args.textworld_games:
        todo["textworld"] = (args.textworld_games, 1)
    done = {}
    for engine, (games, repeats) in todo.items():
        command = [sys.executable, __file__, "--measure", engine, "--data", args.data]
        command += ["--games", str(games), "--repeats", str(repeats)]
        result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        done[engine] = json.loads(result.stdout)
    Console(width=120).print(table(done))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(done, indent=2) + "\n")


if __name__ == "__main__":
    main()
