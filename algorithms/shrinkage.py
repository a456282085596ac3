"""Type-level empirical Bayes of replay gains (methods.md 6.2).

Delta_x = theta_x + e_x, theta_x ~ (m_c, tau_c^2), e_x ~ (0, s_x^2): a noisy gain is drawn towards
its type's mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TypeMoments:
    """Bias-corrected moving means of one task type: M1 = E[Delta], M2 = E[Delta^2], V = E[s^2]."""

    weight: float = 0.0  # W, of the bias correction
    first: float = 0.0
    second: float = 0.0
    noise: float = 0.0
    n: int = 0  # valid tasks seen

    @property
    def mean(self) -> float:
        """m_c."""
        return self.first / self.weight

    @property
    def tau2(self) -> float:
        """tau_c^2 = max(0, M2 - M1^2 - V), what varies between tasks beyond noise."""
        return max(0.0, self.second / self.weight - self.mean**2 - self.noise / self.weight)

    @property
    def pooled_noise(self) -> float:
        """V, mean noise variance of the type."""
        return self.noise / self.weight


class Shrinkage:
    """Moments by type with forgetting: M <- q M + (1 - q) batch mean, only when the type occurs."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.types: dict[str, TypeMoments] = {}

    def update(self, sums: Mapping[str, tuple[float, ...]]) -> None:
        """``sums``: {type: (n, sum Delta, sum Delta^2, sum s^2)} over all ranks."""
        q = self.decay
        for kind, (n, d, d2, s2) in sorted(sums.items()):
            if n:
                m = self.types.setdefault(kind, TypeMoments())
                m.weight = q * m.weight + (1 - q)
                m.first = q * m.first + (1 - q) * d / n
                m.second = q * m.second + (1 - q) * d2 / n
                m.noise = q * m.noise + (1 - q) * s2 / n
                m.n += int(n)

    def posterior(self, kind: str, gain: float, noise: float, mode: str = "own") -> float:
        """g_x = m + B_x (Delta_x - m)."""
        m = self.types[kind]
        return m.mean + self.kept(kind, noise, mode) * (gain - m.mean)

    def kept(self, kind: str, noise: float, mode: str = "own") -> float:
        """B_x = tau^2 / (tau^2 + s_x^2), 0 where tau^2 is 0: the share of Delta_x - m that counts.

        mode: whose noise variance counts: "own", "pooled" (the type's), "blend" (half and half) or
        "max".
        """
        m = self.types[kind]
        s2 = {
            "own": noise,
            "pooled": m.pooled_noise,
            "blend": (noise + m.pooled_noise) / 2,
            "max": max(noise, m.pooled_noise),
        }[mode]
        return m.tau2 / (m.tau2 + s2) if m.tau2 > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {kind: asdict(m) for kind, m in self.types.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.types = {kind: TypeMoments(**m) for kind, m in state.items()}


def type_sums(gains: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, ...]]:
    """(type, Delta, s^2) of tasks -> {type: (n, sum Delta, sum Delta^2, sum s^2)}."""
    done: dict[str, tuple[float, ...]] = {}
    for kind, d, s2 in gains:
        old = done.get(kind, (0.0, 0.0, 0.0, 0.0))
        done[kind] = tuple(a + b for a, b in zip(old, (1.0, d, d * d, s2), strict=True))
    return done
