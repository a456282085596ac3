"""What the search environment says. Shipped in configs/prompts/search_*.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rsipo_lightning.environments.templates import Template


@dataclass(frozen=True, slots=True)
class Wording(Template):
    """A format string for each part."""

    env: ClassVar = "search"
    line: ClassVar = "Your question: {question}"
    must: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "opening": ("question",),
        "next": ("observation",),
        "window": ("question", "history"),
        "step": ("action", "observation"),
    }
    may: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "opening": ("max_steps",),
        "next": ("taken", "max_steps"),
        "window": ("taken", "max_steps"),
        "step": ("step",),
        "invalid": ("why",),
    }

    next: str  # append context: the next message; its {observation} is passages or `invalid`
    window: str  # window context: the next message; its {history} is lines of `step`
    step: str
    invalid: str  # the response was no action
    empty: str  # a search found nothing
    last: str  # the last turn was no answer; seen in transcripts and by who writes a skill
