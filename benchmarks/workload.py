"""The work that both sides of ``speed.py`` do: texts of known lengths, and any reward.

Needs the standard library alone, since the other side runs in an environment of its own. Every word
is one token and there is no end token, so a turn always has as many tokens as it may.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

USER, ASSISTANT, SYSTEM, ASK = "<|user|>", "<|assistant|>", "<|system|>", "Your question:"
PAD = "<|pad|>"
OTHER = 257 + 4  # ids before those of the words: bytes, padding, and the four pieces above
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word(index: int) -> str:
    """One token."""
    return f" w{index:06d}"


@dataclass(frozen=True)
class Workload:
    """One update: ``tasks`` prompts x ``group`` episodes of ``turns`` turns; lengths in tokens."""

    tasks: int = 4
    group: int = 8
    turns: int = 1
    prompt: int = 64
    action: int = 64
    observation: int = 40
    vocabulary: int = 8192

    @property
    def episodes(self) -> int:
        return self.tasks * self.group

    @property
    def row(self) -> int:
        """Tokens of an episode, as a row to train on."""
        return self.prompt + self.turns * self.action + (self.turns - 1) * self.observation

    @property
    def policy_tokens(self) -> int:
        """Sampled in one update."""
        return self.episodes * self.turns * self.action

    def question(self, task: int) -> str:
        """First user message; with its role and that of the answer it has ``prompt`` tokens."""
        return ASK + words(self.prompt - 3, "task", task)

    def answer(self, task: int, turn: int) -> str:
        """What the environment says; with the roles around it it has ``observation`` tokens."""
        return words(self.observation - 2, "seen", task, turn)


def words(count: int, *key: object) -> str:
    """Keyed random words."""
    rng = random.Random("/".join(map(str, key)))
    return "".join(word(rng.randrange(4096)) for _ in range(count))


def reward(text: str) -> float:
    """Any number in [0, 1), so that the rewards of a group differ and each of its rows is
    trained on.
    """
    return zlib.crc32(text.encode()) / 2**32


def digest(prompts: list[tuple[int, ...]]) -> str:
    """Tells whether two sides had the same prompts."""
    return f"{zlib.crc32(repr(sorted(set(prompts))).encode()):08x}"


def peak_mib() -> float:
    """The most memory that this process has held."""
    return _status("VmHWM")


def held_mib() -> float:
    """What it holds now."""
    return _status("VmRSS")


def _status(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        found = next(line for line in file if line.startswith(name))
    return int(found.split()[1]) / 1024
