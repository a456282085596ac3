"""The nouns of ALFWorld: a game, what it shows, and who plays it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

TYPES = (  # in the order of the papers' tables
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


@dataclass(frozen=True, slots=True)
class Game:
    """One game of the released format. ``problem`` alone decides how it plays."""

    id: str  # "<task folder>/<trial folder>"
    split: str  # train, valid_seen, valid_unseen, valid_train
    type: str  # one of TYPES
    problem: str  # PDDL problem, as it stands in game.tw-pddl
    domain: str  # PDDL domain; one string object shared by all games that have the same
    grammar: str  # text grammar, with the sentence that states the task
    walkthrough: tuple[str, ...]  # commands that win; () if the file has none


@dataclass(frozen=True, slots=True)
class View:
    """What a game shows after a reset or a command."""

    text: str  # the game's own words
    admissible: tuple[str, ...]  # commands it would accept, in the order in which it lists them
    won: bool


class PlayedGame(Protocol):
    """One live game. Both engines have it; the same commands give the same views in both."""

    view: View  # the latest

    def reset(self) -> View:
        """Back to the start: always the same view."""

    def step(self, command: str) -> View:
        """One command; what is not admissible says "Nothing happens." and changes nothing."""

    def clone(self) -> Self:
        """An independent copy that goes on from the same state."""

    def state_hash(self) -> str:
        """Equal for equal states of the same game, in every process."""

    def close(self) -> None:
        """Free what it holds. May be called twice."""


class GameEngine(Protocol):
    """Opens games. ``open`` may be called for many games that are live at once."""

    def open(self, game: Game) -> PlayedGame:
        """A live game that has been reset. DataError for a game that cannot be read."""

    def close(self) -> None:
        """Free workers and caches. May be called twice."""
