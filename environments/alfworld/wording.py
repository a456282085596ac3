"""What the ALFWorld environment says. Shipped in configs/prompts/alfworld_*.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rsipo_lightning.environments.templates import Template


@dataclass(frozen=True, slots=True)
class AlfworldWording(Template):
    """A format string for each part. {admissible} is the part of that name, or empty."""

    env: ClassVar = "alfworld"
    line: ClassVar = "Your task is to: {task}"
    must: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "opening": ("task", "observation", "admissible"),
        "next": ("observation", "admissible"),
        "window": ("task", "history", "observation", "admissible"),
        "step": ("observation", "action"),
        "admissible": ("commands",),
    }
    may: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "opening": ("max_steps",),
        "next": ("taken", "step", "max_steps"),
        "window": ("taken", "step", "shown", "max_steps"),
        "step": ("step",),
        "invalid": ("why",),
    }

    next: str  # append context: the next message
    window: str  # window context: the next message; its {history} is lines of `step`
    step: str  # what was seen, and what was done then
    admissible: str
    invalid: str  # the observation where the response was no action
