"""Means and intervals over tasks, and the forms in which they are shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from rsipo_lightning.callbacks.eval_result import SUCCESS, EvalResult, Sums, Tally, details
from rsipo_lightning.metrics import wilson
from rsipo_lightning.types import RolloutGroup, Stop


def once(n: int, won: float, **values: float) -> Tally:
    """n tasks, each played once; values are shares of 0 or 1."""
    sums = {name: Sums(v, v) for name, v in {SUCCESS: won, **values}.items()}
    return Tally(n, n, 3 * n, 2 * n, values=sums)


def result(**types: Tally) -> EvalResult:
    return EvalResult("search", "all", 0.4, types, 2.5)


def group(
    make: SimpleNamespace,
    outcomes: list[bool],
    measures: list[dict[str, float]] | None = None,
    broken: int = 0,
) -> RolloutGroup:
    task = make.task()
    each = measures or [{} for _ in outcomes]
    played = [make.trajectory(task, o, measures=m) for o, m in zip(outcomes, each, strict=True)]
    played += [make.trajectory(task, stop=Stop.ERROR)] * broken
    return RolloutGroup(task, tuple(played))


def test_a_group_is_one_task_with_the_mean_of_its_episodes(make: SimpleNamespace) -> None:
    tally = Tally.of(group(make, [True, False, False], broken=1))
    assert (tally.n, tally.tasks, tally.broken) == (3, 1, 1)
    assert tally.values[SUCCESS] == Sums(1 / 3, 1 / 9)
    assert Tally.of(group(make, [], broken=2)) == Tally(broken=2)


def test_an_episode_without_a_measure_counts_as_0_of_it(make: SimpleNamespace) -> None:
    cut_off = group(make, [True, False], [{"lenient_match": 1.0}, {}])
    assert Tally.of(cut_off).values["lenient_match"] == Sums(0.5, 0.25)
    total = Tally.of(cut_off) + Tally.of(group(make, [False]))  # no measure at all
    assert total.estimate("lenient_match").mean == 0.25
    assert total.measures == ("lenient_match",)


@pytest.mark.parametrize(("n", "won"), [(1, 0), (10, 0), (10, 8), (37, 5), (12, 12)])
def test_tasks_played_once_have_wilsons_interval(n: int, won: int) -> None:
    estimate = once(n, won).estimate()
    assert estimate == pytest.approx((won / n, *wilson(won, n)))


def test_episodes_of_a_task_count_as_so_many_independent_ones() -> None:
    """Four tasks, three episodes each."""
    same = Tally(12, 4, values={SUCCESS: Sums(2, 2)})  # 1 1 0 0: no more than four episodes
    assert same.estimate() == pytest.approx((0.5, *wilson(2, 4)))
    # 2/3 2/3 1/3 1/3: variance 1/36, a ninth of .25, would be 36 episodes; there are 12
    even = Tally(12, 4, values={SUCCESS: Sums(2, 10 / 9)})
    assert even.estimate() == pytest.approx((0.5, *wilson(6, 12)))
    # 1 2/3 1/3 0: variance 5/36, so 4 * .25 / (5/36) = 7.2 episodes
    mixed = Tally(12, 4, values={SUCCESS: Sums(2, 14 / 9)})
    assert mixed.estimate() == pytest.approx((0.5, *wilson(3.6, 7.2)))
    none = Tally(12, 4, values={SUCCESS: Sums(0, 0)})  # nothing varies: four tasks
    assert none.estimate() == pytest.approx((0, *wilson(0, 4)))


def test_tasks_that_repeat_one_another_are_taken_together(make: SimpleNamespace) -> None:
    twice = Tally.of(group(make, [True]), group(make, [False, True]), group(make, [], broken=1))
    assert (twice.n, twice.tasks, twice.broken, twice.repeats) == (3, 2, 1, 2)
    assert twice.values[SUCCESS] == Sums(1.5, 2 * 0.75**2)
    # drawn twice, once and once, all of them alike in their draws: 16/6 tasks
    same = Tally.of(group(make, [True]), group(make, [True])) + once(2, 0)
    assert same.estimate() == pytest.approx((0.5, *wilson(16 / 12, 16 / 6)))
    # one of two draws won twice: as good as all four, since the games are alike
    half = [Tally.of(group(make, [True]), group(make, [False])) for _ in range(2)]
    assert sum(half, Tally()).estimate() == pytest.approx((0.5, *wilson(2, 4)))
    queries = [{"queries": 2.0}, {"queries": 4.0}]
    few, many = (Tally.of(group(make, [True], [m]), group(make, [True], [m])) for m in queries)
    side = 1.959963984540054 / 2**0.5  # two games, however often drawn
    assert (few + many).estimate("queries") == pytest.approx((3, 3 - side, 3 + side))


def test_the_interval_covers_where_games_are_drawn_with_repeats() -> None:
    """128 draws of 140 games, most of them nearly always or nearly never won."""
    rng = np.random.default_rng(2)
    covered = apart = 0
    for _ in range(1000):
        times = np.bincount(rng.integers(140, size=128), minlength=140)
        won = rng.binomial(times, rng.beta(0.2, 0.2, 140))[times > 0]
        times = times[times > 0]
        sums = Sums(won.sum(), (won**2 / times).sum())
        repeats = (times * (times - 1)).sum()
        _, low, high = Tally(128, 128, values={SUCCESS: sums}, repeats=repeats).estimate()
        covered += low <= 0.5 <= high
        low, high = wilson(won.sum(), 128)
        apart += low <= 0.5 <= high
    assert 935 <= covered <= 980
    assert apart < 900


def test_a_measure_that_is_no_share_has_the_normal_interval() -> None:
    queries = Tally(2, 2, values={"queries": Sums(6, 20)})  # 2 and 4
    half = 1.959963984540054 / 2**0.5
    assert queries.estimate("queries") == pytest.approx((3, 3 - half, 3 + half))
    assert result(one=queries).macro("queries") == queries.estimate("queries")


def test_the_interval_covers_where_episodes_of_a_task_are_alike() -> None:
    """60 tasks of rates from Beta(.5, .5), three episodes each; pooling covers too little."""
    rng = np.random.default_rng(0)
    covered = pooled = 0
    for _ in range(1000):
        means = rng.binomial(3, rng.beta(0.5, 0.5, 60)) / 3
        sums = Sums(means.sum(), (means**2).sum())
        _, low, high = Tally(180, 60, values={SUCCESS: sums}).estimate()
        covered += low <= 0.5 <= high
        low, high = wilson(3 * sums.total, 180)
        pooled += low <= 0.5 <= high
    assert 930 <= covered <= 975
    assert pooled < 870


def test_macro_average_by_hand() -> None:
    """Types count the same, however many tasks they have; one success and one failure each."""
    found = result(one=once(10, 8), two=once(90, 9), none=Tally(broken=3))
    mean, low, high = found.macro()
    assert mean == pytest.approx((0.8 + 0.1) / 2)
    variance = (9 / 12 * 3 / 12 / 12 + 10 / 92 * 82 / 92 / 92) / 4
    assert (low + high) / 2 == pytest.approx((9 / 12 + 10 / 92) / 2)
    assert (high - low) / 2 == pytest.approx(1.959963984540054 * variance**0.5)
    assert found.overall.success_frac == 17 / 100


@pytest.mark.parametrize("won", [0, 20])
@pytest.mark.parametrize("types", [1, 7])
def test_macro_average_where_all_types_agree_at_an_end(types: int, won: int) -> None:
    mean, low, high = result(**{f"t{i}": once(20, won) for i in range(types)}).macro()
    assert mean == won / 20
    assert 0 <= low <= mean <= high <= 1
    assert 0.02 < high - low < 0.21


def test_the_macro_interval_covers() -> None:
    """Seven types near 0, of very different sizes: where many intervals fail."""
    rng = np.random.default_rng(1)
    rates, sizes = np.linspace(0.01, 0.1, 7), [20, 30, 40, 60, 100, 200, 400]
    covered = 0
    for _ in range(1000):
        won = rng.binomial(sizes, rates)
        types = {str(i): once(n, int(w)) for i, (n, w) in enumerate(zip(sizes, won, strict=True))}
        _, low, high = result(**types).macro()
        covered += low <= rates.mean() <= high
    assert 940 <= covered <= 985


def test_log_keys() -> None:
    found = result(one=once(10, 8, lenient_match=9), two=once(30, 3, lenient_match=3))
    assert found.row("test") == pytest.approx(
        {
            "test/success_frac": 11 / 40,
            "test/macro_success_frac": 0.45,
            "test/lenient_match_mean": 12 / 40,
            "test/search/one/success_frac": 0.8,
            "test/search/two/success_frac": 0.1,
        }
    )


def test_json_and_back() -> None:
    found = result(one=once(8, 4, lenient_match=5), two=Tally(broken=1))
    data = json.loads(json.dumps(found.to_json()))
    assert EvalResult.from_json(data) == found
    del data["types"]["one"]["repeats"]  # as older runs wrote it
    assert EvalResult.from_json(data) == found
    assert data["types"]["one"]["interval"] == pytest.approx(wilson(4, 8))
    assert data["overall"]["measures"]["lenient_match"]["mean"] == 5 / 8
    assert data["macro"]["success_frac"] == 0.5


def test_the_table_in_detail() -> None:
    twice = Tally(20, 10, 60, 30, 2, {SUCCESS: Sums(0, 0), "lenient_match": Sums(1, 0.5)})
    found = result(nq=once(10, 8, lenient_match=9), popqa=twice, musique=Tally(broken=1))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(details(found))
    lines = console.export_text().splitlines()

    def cells(name: str) -> list[str]:
        line = next(line for line in lines if name in line)
        return [cell.strip() for cell in line.strip("│").split("│")]

    assert "at temperature 0.4" in lines[0]
    assert cells("nq") == [
        "nq",
        "10",
        "80.0 (49.0-94.3)",
        "90.0 (59.6-98.2)",
        "66.7",
        "3.00",
    ]
    assert cells("popqa")[2] == "0.0 (0.0-27.8)"
    assert cells("musique") == ["musique", "0", "-", "-", "-", "-"]
    assert cells("sample average")[1:3] == ["20", "40.0 (21.9-61.3)"]
    assert cells("macro average")[2].startswith("40.0 (")
    assert cells("macro average")[4:] == ["", ""]  # these are of the sample
    caption = " ".join(" ".join(lines[-3:]).split())
    assert "30 episodes; the intervals take the task as the unit; 3 episodes broke" in caption
