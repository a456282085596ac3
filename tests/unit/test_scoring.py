"""Which forwards an update makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rsipo_lightning.module import PolicyModule
from rsipo_lightning.testing import gradient, make_algorithm, toy_world
from rsipo_lightning.types import Credit, Sample

WORLD = toy_world()
OFF = {"distill": 0.0, "skill": 0.0}


def module(name: str, **keys: Any) -> PolicyModule:
    algorithm = make_algorithm(name, WORLD.codec, **keys)
    return WORLD.module(algorithm, WORLD.iteration(algorithm))


def work(m: PolicyModule) -> tuple[int, int]:
    """Forwards and tokens of an update, of policy and reference."""
    m.forwards()
    gradient(m, m.samples(m.iteration), 2)
    forwards, tokens = m.forwards().values()
    return forwards, tokens


def test_rsipo_without_its_terms_does_the_work_of_grpo() -> None:
    off, grpo = module("rsipo", **OFF), module("grpo")
    assert work(off) == work(grpo)
    assert not off.iteration.skills  # and asks the engine for nothing
    assert not off.iteration.replays
    forwards, tokens = work(grpo)
    more = work(module("rsipo"))
    assert more[0] > forwards
    assert more[1] > tokens


def test_the_policy_scores_nothing_where_no_term_reads_it() -> None:
    assert work(module("grpo", kl=0.0))[0] == 2  # the micro-batches
    assert work(module("grpo"))[0] == 2 + 4  # the reference, in as many parts as an update has


def valued(sample: Sample, **values: float) -> Sample:
    """With these values in its streams."""
    credits = {
        name: Credit(weight, torch.full_like(value, values.get(name, 0.0)))
        for name, (weight, value) in sample.credits.items()
    }
    return replace(sample, credits=credits)


def test_rows_are_scored_for_the_terms_that_read_them() -> None:
    m = module("rsipo")
    rows = m.algorithm.credit(m.iteration, m.algorithm.statistics(m.iteration))
    taught = next(s for s in rows if "teacher" in s.views)
    made = [
        valued(taught, actor=1.0, kl=1.0, teacher=1.0),
        valued(taught, actor=1.0, kl=1.0),  # a trust of 0
        valued(taught, actor=1.0),
        valued(taught),
    ]
    assert [set(s.scores) for s in m.score(made)] == [
        {"teacher", "reference"},
        {"reference"},
        set(),
        set(),
    ]


@pytest.mark.parametrize("name", ["rsipo", "sdar", "seed", "skill_sd", "grpo_opsd"])
def test_scores_that_are_left_out_change_no_update(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups whose rewards are equal, one whose teacher is not trusted."""
    m = module(name, kl=0.0, entropy=0.0)
    rows = m.algorithm.credit(m.iteration, m.algorithm.statistics(m.iteration))
    rows = [
        valued(s, actor=float(i % 3), teacher=float(i % 2), writer=1.0) for i, s in enumerate(rows)
    ]
    scored = m.score(rows)
    monkeypatch.setattr(PolicyModule, "_reads", lambda *_: True)
    whole = m.score(rows)
    assert sum(len(s.scores) for s in scored) < sum(len(s.scores) for s in whole)
    assert torch.allclose(gradient(m, scored, 2), gradient(m, whole, 2), rtol=1e-5, atol=1e-6)
