"""``python -m rsipo_lightning.environments.alfworld.parity``: do both engines play alike?

The same games (real and generated) and commands in the built-in engine and in the package's own:
text, admissible commands (and their order) and the won flag are compared after the reset and after
every command.
Exit code 1 if anything differs. Needs the extra ``alfworld``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.game import TYPES, Game, GameEngine, PlayedGame, View
from rsipo_lightning.environments.alfworld.games import read_games
from rsipo_lightning.environments.alfworld.generate import GeneratedGames
from rsipo_lightning.environments.alfworld.textworld import TextWorldEngine
from rsipo_lightning.errors import EnvironmentFault, RsipoError
from rsipo_lightning.rng import keyed_random

_JUNK = ("", "xyzzy", "look around", "LOOK", "go to nowhere 1", "take apple 1", " inventory ")
_IDLE = ("help", "inventory", "look")  # these change nothing
_SHOWN = 20  # differences


@dataclass
class Outcome:
    """Of one game; ``differences`` are lines, at most one of each sequence."""

    commands: int = 0
    won: bool = False  # in any sequence
    kinds: Counter[str] = field(default_factory=Counter)  # first words of the commands
    differences: list[str] = field(default_factory=list)


def compare(game: Game, ours: GameEngine, reference: GameEngine, steps: int, seed: int) -> Outcome:
    """Play ``steps`` random commands, and the walkthrough with detours, in both engines.

    A sequence ends at its first difference. An engine that refuses or breaks the game has differed.
    """
    outcome = Outcome()
    for name in ("random", "walkthrough"):
        rng = keyed_random(seed, "parity", game.id, name)
        walk = game.walkthrough if name == "walkthrough" else None
        try:
            pair = (ours.open(game), reference.open(game))
            commands = _commands(pair[1], walk, steps, rng)
            outcome.differences += _side_by_side(f"{game.id}, {name}", pair, commands, outcome)
        except EnvironmentFault:
            raise
        except RsipoError as error:
            outcome.differences.append(f"{game.id}, {name}: {error}")
            continue
        for played in pair:
            played.close()
    return outcome


def _commands(
    played: PlayedGame, walk: Sequence[str] | None, steps: int, rng: random.Random
) -> Iterator[str]:
    """``steps`` random commands, or ``walk`` with one before every fifth or so and a few after."""

    def random_command() -> str:
        if rng.random() < 0.1:
            return rng.choice(_JUNK)
        # a kind of command first: most commands go somewhere
        kinds: dict[str, list[str]] = {}
        for command in played.view.admissible:
            kinds.setdefault(command.split()[0], []).append(command)
        weights = [1 if kind in _IDLE else 4 for kind in kinds]
        return rng.choice(kinds[rng.choices([*kinds], weights)[0]])

    if walk is None:
        for _ in range(steps):
            yield random_command()
        return
    for command in walk:
        if rng.random() < 0.2:
            yield random_command()
        yield command
    for _ in range(5):
        yield random_command()


def _side_by_side(
    name: str, pair: tuple[PlayedGame, PlayedGame], commands: Iterator[str], outcome: Outcome
) -> list[str]:
    ours, reference = pair
    at = "at the start"
    while True:
        if difference := _difference(ours.view, reference.view):
            return [f"{name}, {at}: {difference}"]
        outcome.won |= reference.view.won
        command = next(commands, None)
        if command is None:
            return []
        outcome.commands += 1
        outcome.kinds[command.split()[0] if command in reference.view.admissible else "junk"] += 1
        at = f"command {outcome.commands} ({command!r})"
        ours.step(command)
        reference.step(command)


def _difference(ours: View, reference: View) -> str:
    if ours.text != reference.text:
        return f"says {ours.text!r}, not {reference.text!r}"
    if ours.won != reference.won:
        return f"won is {ours.won}, not {reference.won}"
    if ours.admissible != reference.admissible:
        more = sorted(set(ours.admissible) - set(reference.admissible))
        less = sorted(set(reference.admissible) - set(ours.admissible))
        return f"admits {more} too, but not {less}" if more or less else "another order of commands"
    return ""


def compare_all(
    games: Sequence[Game], jobs: int, steps: int = 30, seed: int = 0
) -> Iterator[tuple[Game, Outcome]]:
    """Outcomes in the order of the games, ``jobs`` games at once."""
    ours, reference = BuiltinEngine(), TextWorldEngine(workers=jobs)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from zip(
                games,
                pool.map(lambda game: compare(game, ours, reference, steps, seed), games),
                strict=True,
            )
    finally:
        reference.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if the engines play alike, 1 if not, 2 if they could not be compared."""
    parser = argparse.ArgumentParser(prog="parity", description=__doc__.partition("\n")[0])
    data = Path(os.environ.get("RSIPO_DATA", "../shared/data")) / "alfworld" / "games.jsonl.xz"
    parser.add_argument("--data", type=Path, default=data, help="games (default: %(default)s)")
    parser.add_argument("--train", type=int, default=300, help="random games of train (300)")
    parser.add_argument("--valid-seen", type=int, default=140, help="and of valid_seen (140)")
    parser.add_argument("--generated", type=int, default=60, help="and generated ones (60)")
    parser.add_argument("--steps", type=int, default=30, help="random commands in a game (30)")
    parser.add_argument("--seed", type=int, default=0, help="of games and commands (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="games at once (cores)")
    args = parser.parse_args(arguments)
    console = Console()
    try:
        games = sample(args.data, {"valid_seen": args.valid_seen, "train": args.train}, args.seed)
        generated = GeneratedGames(args.seed).split("train")
        games += [generated[i] for i in range(args.generated)]
        with Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as bars:
            found = compare_all(games, args.jobs, args.steps, args.seed)
            outcomes = list(bars.track(found, total=len(games), description="games"))
    except RsipoError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    console.print(_table(outcomes))
    kinds = sum((outcome.kinds for _, outcome in outcomes), Counter[str]())
    console.print("commands: " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()))
    differences = [line for _, outcome in outcomes for line in outcome.differences]
    for line in differences[:_SHOWN]:
        console.print(line, markup=False, highlight=False)
    if len(differences) > _SHOWN:
        console.print(f"and {len(differences) - _SHOWN} more")
    return 1 if differences else 0


def sample(path: Path, counts: Mapping[str, int], seed: int) -> list[Game]:
    """So many random games of each split, or all that it has; the same for the same seed."""
    chosen: list[Game] = []
    for split, count in counts.items():
        games = read_games(path, split)
        rng = keyed_random(seed, "parity", split)
        chosen += rng.sample(games, min(count, len(games)))
    return chosen


def _table(outcomes: Sequence[tuple[Game, Outcome]]) -> Table:
    table = Table("task type", title="Built-in engine against the alfworld package")
    for name in ("games", "won", "commands", "differences"):
        table.add_column(name, justify="right")
    for type_ in (*TYPES, "all"):
        of_type = [o for game, o in outcomes if type_ in (game.type, "all")]
        table.add_row(
            type_,
            str(len(of_type)),
            str(sum(outcome.won for outcome in of_type)),
            str(sum(outcome.commands for outcome in of_type)),
            str(sum(len(outcome.differences) for outcome in of_type)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
