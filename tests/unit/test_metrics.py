"""Metrics: worked-out numbers, and two real processes with unequal key sets."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from torch import distributed

from rsipo_lightning import keys
from rsipo_lightning.metrics import Metrics, wilson


def test_each_kind_gives_the_number_worked_out_by_hand() -> None:
    metrics = Metrics()
    metrics.mean("a/x_mean", 1.0, weight=3)
    metrics.mean("a/x_mean", 5.0)
    metrics.total("a/n_count", 2)
    metrics.total("a/n_count", 5)
    metrics.maximum("a/t_max", -3)
    metrics.maximum("a/t_max", -7)
    metrics.fraction("a/hit_frac", 1, 2)
    metrics.fraction("a/hit_frac", 0, 2)
    expected = {"a/hit_frac": 0.25, "a/n_count": 7.0, "a/t_max": -3.0, "a/x_mean": 2.0}
    assert metrics.reduce() == expected


def test_values_keep_double_precision() -> None:
    metrics = Metrics()
    metrics.total("a/n_count", 16777216)  # 2^24: the next integer does not exist in float32
    metrics.total("a/n_count", 1)
    metrics.mean("a/x_mean", 0.1)
    assert metrics.reduce() == {"a/n_count": 16777217.0, "a/x_mean": 0.1}


def test_nothing_measured_is_left_out_and_a_fraction_of_nothing_is_zero() -> None:
    metrics = Metrics()
    metrics.mean("a/x_mean", math.nan, weight=0)  # the mean of an empty tensor
    metrics.fraction("a/hit_frac", 0, 0)
    assert metrics.reduce() == {"a/hit_frac": 0.0}


def test_a_measured_nan_is_shown() -> None:
    metrics = Metrics()
    metrics.mean("loss/total", math.nan)
    metrics.mean("loss/total", 1.0)
    assert math.isnan(metrics.reduce()["loss/total"])


def test_a_key_has_one_kind() -> None:
    metrics = Metrics()
    metrics.mean("a/x", 1.0)
    with pytest.raises(ValueError, match=r"'a/x' is a mean, not a total"):
        metrics.total("a/x", 1.0)


def _rank(rank: int, store: str, results: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    metrics = Metrics()
    metrics.mean("a/x_mean", 1.0 + rank, weight=1 + 2 * rank)
    metrics.total("a/n_count", 10)
    metrics.maximum("a/t_max", rank)
    if rank == 1:
        metrics.mean("a/only_here_mean", 4.0)
    results.put((rank, metrics.reduce()))
    distributed.destroy_process_group()


def test_ranks_with_unequal_keys_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        rows = dict(results.get(timeout=90) for _ in workers)
    except Empty:
        pytest.fail("the ranks wait for each other")
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    expected = {"a/n_count": 20.0, "a/only_here_mean": 4.0, "a/t_max": 1.0, "a/x_mean": 1.75}
    assert rows == {0: expected, 1: expected}


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (8, 10, (0.4902, 0.9433)),
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_wilson_interval(successes: int, n: int, interval: tuple[float, float]) -> None:
    assert wilson(successes, n) == pytest.approx(interval, abs=5e-5)


def test_keys_hold_no_blanks_or_extra_slashes() -> None:
    key = keys.by_type("val", "search", "pick two / heat")
    assert key == "val/search/pick_two_heat/success_frac"
