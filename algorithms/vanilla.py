"""Vanilla: the policy as it is (methods.md 5.1). It acts, and nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rsipo_lightning.algorithms.base import Algorithm, AlgorithmConfig, Stream, Sums
from rsipo_lightning.types import Iteration, Sample

V = TypeVar("V", bound=AlgorithmConfig)


class Vanilla(Algorithm[V]):
    """No term, so no optimizer step changes the policy."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L = 0."""
        return {}

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """No rows."""
        return []
