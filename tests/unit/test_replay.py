"""The paper's worked examples and the empirical Bayes (methods.md 6.2, 6.4)."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from rsipo_lightning.algorithms.shrinkage import Shrinkage, type_sums
from rsipo_lightning.replay import gain, utility


def test_alfworld_example() -> None:
    """Two soap bottles: four replays whose steps sum to 49, four failed controls, T_max 50."""
    treated = [utility(True, t, 50, 0.5) for t in (10, 12, 13, 14)]
    control = [utility(False, 50, 50, 0.5)] * 4
    delta, noise = gain(treated, control) or (0, 0)
    assert delta == pytest.approx(0.8775, abs=1e-12)
    assert noise > 0


def test_search_example() -> None:
    """All at three turns, 4 of 4 against 1 of 4, T_max 4."""
    treated = [utility(True, 3, 4, 0.5)] * 4
    control = [utility(True, 3, 4, 0.5), *[utility(False, 3, 4, 0.5)] * 3]
    delta, noise = gain(treated, control) or (0, 0)
    assert delta == pytest.approx(0.46875, abs=1e-12)
    assert noise == pytest.approx(
        0.625**2 / 4 / 4, abs=1e-12
    )  # S_c^2 = .625^2 / 4, over 4; S_r^2 = 0


def test_any_success_beats_any_failure() -> None:
    assert utility(True, 50, 50, 0.5) == 0.5
    assert utility(False, 1, 50, 0.5) == 0


def test_without_a_length_penalty_a_gain_is_the_difference_of_success_rates() -> None:
    """Alpha 0 (methods.md 13 b), whatever the steps."""
    treated = [utility(won, t, 4, 0.0) for won, t in ((True, 1), (True, 4), (False, 2), (True, 3))]
    control = [utility(won, t, 4, 0.0) for won, t in ((True, 4), (False, 4), (False, 1))]
    delta, _ = gain(treated, control) or (0, 0)
    assert delta == pytest.approx(3 / 4 - 1 / 3)


@pytest.mark.parametrize(
    ("treated", "control"), [([1.0], [0.0, 0.0]), ([1.0, 1.0], [0.0]), ([], [])]
)
def test_one_outcome_is_no_gain(treated: list[float], control: list[float]) -> None:
    assert gain(treated, control) is None


def drawn(
    seed: int, tasks: int, mean: float, spread: float, noise: float
) -> list[tuple[float, float, float]]:
    """(theta, Delta, s^2) of tasks of one type."""
    rng = random.Random(seed)
    thetas = [rng.gauss(mean, spread) for _ in range(tasks)]
    return [(t, t + rng.gauss(0, noise), noise**2) for t in thetas]


def test_moments_recover_mean_and_spread() -> None:
    """Monte Carlo: over many updates m and tau^2 approach the truth although noise is twice the
    spread.
    """
    shrinkage, means, taus = Shrinkage(0.98), [], []
    for update in range(600):
        shrinkage.update(type_sums(("a", d, s2) for _, d, s2 in drawn(update, 8, 0.1, 0.1, 0.2)))
        if update > 100:
            means.append(shrinkage.types["a"].mean)
            taus.append(
                shrinkage.types["a"].second / shrinkage.types["a"].weight
                - shrinkage.types["a"].mean ** 2
                - shrinkage.types["a"].noise / shrinkage.types["a"].weight
            )
    assert fmean(means) == pytest.approx(0.1, abs=0.01)
    assert fmean(taus) == pytest.approx(0.01, abs=0.003)


def test_posterior_lies_between_mean_and_gain_and_beats_the_raw_gain() -> None:
    shrinkage = Shrinkage(0.9)
    for update in range(60):
        shrinkage.update(type_sums(("a", d, s2) for _, d, s2 in drawn(update, 16, 0.05, 0.08, 0.2)))
    m = shrinkage.types["a"].mean
    fresh = drawn(10**6, 2000, 0.05, 0.08, 0.2)
    posteriors = [shrinkage.posterior("a", d, s2) for _, d, s2 in fresh]
    for (_, d, _), g in zip(fresh, posteriors, strict=True):
        assert min(m, d) - 1e-12 <= g <= max(m, d) + 1e-12
    raw = fmean((d - t) ** 2 for t, d, _ in fresh) ** 0.5
    shrunk = fmean((g - t) ** 2 for (t, _, _), g in zip(fresh, posteriors, strict=True)) ** 0.5
    assert shrunk < 0.6 * raw


def test_degenerate_cases() -> None:
    """tau^2 = 0 gives the type's mean; s^2 = 0 with tau^2 > 0 gives the full gain."""
    same = Shrinkage(0.9)
    same.update({"a": (4.0, 2.0, 1.0, 0.0)})  # all gains .5, no noise
    assert same.posterior("a", 0.9, 0.0) == pytest.approx(0.5)
    spread = Shrinkage(0.9)
    spread.update({"a": (2.0, 1.0, 1.0, 0.0)})  # gains 0 and 1
    assert spread.posterior("a", 1.0, 0.0) == 1.0
    assert spread.posterior("a", 1.0, 0.25) == pytest.approx(0.75)  # tau^2 = .25: B = 1/2


def test_noise_modes() -> None:
    s = Shrinkage(0.9)
    s.update({"a": (2.0, 1.0, 1.2, 0.2)})  # m .5, M2 .6, V .1 -> tau^2 .25
    by_mode = {mode: s.posterior("a", 1.0, 0.0, mode) for mode in ("own", "pooled", "blend", "max")}
    assert by_mode["own"] == 1.0
    assert by_mode["pooled"] == by_mode["max"] == pytest.approx(0.5 + 0.25 / 0.35 * 0.5)
    assert by_mode["blend"] == pytest.approx(0.5 + 0.25 / 0.30 * 0.5)


def test_forgetting_is_bias_corrected_and_per_type() -> None:
    s = Shrinkage(0.9)
    s.update({"a": (1.0, 0.4, 0.16, 0.0)})
    assert s.types["a"].mean == pytest.approx(0.4)  # not .04
    s.update({"b": (1.0, -1.0, 1.0, 0.0)})
    assert s.types["a"].mean == pytest.approx(0.4)
    s.update({"a": (2.0, 2.0, 2.0, 0.0)})
    assert s.types["a"].mean == pytest.approx((0.9 * 0.1 * 0.4 + 0.1 * 1.0) / (0.9 * 0.1 + 0.1))
    assert s.types["a"].n == 3


def test_state_round_trip() -> None:
    s = Shrinkage(0.9)
    s.update({"a": (2.0, 1.0, 1.2, 0.2)})
    other = Shrinkage(0.9)
    other.load_state_dict(s.state_dict())
    assert other.posterior("a", 0.7, 0.1) == s.posterior("a", 0.7, 0.1)
