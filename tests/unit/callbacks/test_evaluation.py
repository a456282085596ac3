"""Evaluations before, during and after a toy run whose policy succeeds once it is trained."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rsipo_lightning.callbacks import evaluation
from rsipo_lightning.callbacks.checkpoints import Checkpoints, latest
from rsipo_lightning.callbacks.eval_result import SUCCESS, EvalResult, Sums, Tally, table
from rsipo_lightning.callbacks.evaluation import Evaluation, choose, choose_per_type, evaluate
from rsipo_lightning.callbacks.interrupt import Interrupt
from rsipo_lightning.callbacks.logging import MetricsLogger
from rsipo_lightning.callbacks.transcripts import Transcripts
from rsipo_lightning.config import EvalSection
from rsipo_lightning.errors import EnvironmentFault
from rsipo_lightning.types import Role, RolloutGroup, Stop, Task


def tally(n: int, won: int) -> Tally:
    """n tasks, each played once."""
    return Tally(n, n, values={SUCCESS: Sums(won, won)})


CONFIG = EvalSection(episodes=10, every=2, val_episodes=4, temperature=0.7)


def test_before_between_and_after(make: SimpleNamespace, tmp_path: Path) -> None:
    module = make.Toy()
    transcripts = Transcripts(tmp_path, groups=1)
    evaluation = Evaluation(make.Suite(), tmp_path, CONFIG, transcripts.write_evaluation)
    make.fit(module, tmp_path, [make.Collector(), transcripts, evaluation, MetricsLogger()], 3)

    assert [(len(ids), role, n, t) for ids, role, n, t, _ in module.played] == [
        (10, Role.EVAL, 1, 0.7),
        (4, Role.EVAL, 1, 0.7),
        (10, Role.EVAL, 1, 0.7),
    ]
    # same tasks and same noise before and after
    assert module.played[0] == module.played[2]
    assert len(set(module.played[0][0])) == 10
    assert evaluation.before is not None
    assert evaluation.after is not None
    assert evaluation.before.types["two_hop"].success_frac == 0
    assert evaluation.before.types["one_hop"].success_frac == 1
    assert evaluation.after.overall.success_frac == 1

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    test = [(e.step, e.value) for e in events.Scalars("test/success_frac")]
    assert test == [
        (0, pytest.approx(evaluation.before.overall.success_frac)),
        (3, 1.0),
    ]
    val = [(e.step, e.value) for e in events.Scalars("val/success_frac")]
    assert val == [(2, 1.0)]
    assert "val/search/two_hop/success_frac" in events.Tags()["scalars"]

    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    roles = [(row["update"], row["role"]) for row in map(json.loads, lines)]
    assert roles == [(0, "eval"), (2, "eval"), (3, "eval")]


def test_each_phase_of_an_algorithm_is_looked_at(make: SimpleNamespace, tmp_path: Path) -> None:
    """The first one is the result and has the plain names; the same tasks and noise for all."""
    module, phases = make.Toy(), ("plain", "skill")
    looks = Evaluation(make.Suite(), tmp_path, CONFIG, phases=phases)
    make.fit(module, tmp_path, [make.Collector(), looks, MetricsLogger()], 2)
    assert module.phases == ["plain", "skill"] * 3
    assert module.played[0] == module.played[1]
    assert sorted(looks.looks) == ["after", "after_skill", "before", "before_skill"]
    stored = json.loads((tmp_path / "eval.json").read_text())
    assert {name: look["updates"] for name, look in stored.items()} == {
        "before": 0,
        "before_skill": 0,
        "after": 2,
        "after_skill": 2,
    }
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = {f"{area}/success_frac" for area in ("test", "test_skill", "val", "val_skill")}
    assert names <= set(events.Tags()["scalars"])
    again = Evaluation(make.Suite(), tmp_path, CONFIG, phases=phases)
    again.setup(SimpleNamespace(max_epochs=2), module, "fit")  # type: ignore[arg-type]
    assert again.looks == looks.looks


def test_a_resumed_run_does_not_repeat_the_look_before(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    config = EvalSection(episodes=10, every=0, temperature=1.0)
    first = Evaluation(make.Suite(), tmp_path, config)
    interrupt = Interrupt()
    interrupt.presses = 1
    callbacks = [make.Collector(), first, interrupt, Checkpoints(tmp_path, 1, 2)]
    make.fit(make.Toy(), tmp_path, callbacks, 3)
    assert first.before is not None
    assert first.after is None  # stopped early

    module, second = make.Toy(), Evaluation(make.Suite(), tmp_path, config)
    callbacks = [make.Collector(), second, Checkpoints(tmp_path, 1, 2)]
    make.fit(module, tmp_path, callbacks, 3, ckpt_path=latest(tmp_path))
    assert len(module.played) == 1
    assert second.before == first.before
    assert second.after is not None


@pytest.mark.parametrize("change", ["tasks", "number", "temperature"])
def test_what_was_asked_before_is_dropped_if_other_things_are_asked_now(
    make: SimpleNamespace, tmp_path: Path, change: str
) -> None:
    """The table would call them the same tasks."""
    suite = make.Suite()
    callbacks = [Evaluation(suite, tmp_path, CONFIG), Checkpoints(tmp_path, 1, 2)]
    make.fit(make.Toy(), tmp_path, [make.Collector(), *callbacks], 1)
    config = CONFIG
    if change == "tasks":  # of the same ids
        tasks, suite = suite.tasks, make.Suite()
        suite.tasks = lambda split: [replace(t, payload={"other": 1}) for t in tasks(split)]
    else:
        config = replace(CONFIG, **{"number": {"episodes": 8}}.get(change, {"temperature": 0.8}))
    evaluation = Evaluation(suite, tmp_path, config)
    make.fit(make.Toy(), tmp_path, [make.Collector(), evaluation], 2, ckpt_path=latest(tmp_path))
    assert evaluation.before is None
    assert evaluation.after is not None
    assert list(json.loads((tmp_path / "eval.json").read_text())) == ["after"]


def test_finish_looks_once_where_nothing_is_left_to_train(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 2)], 2)
    module, evaluation = make.Toy(), Evaluation(make.Suite(), tmp_path, CONFIG)
    trainer = make.fit(module, tmp_path, [evaluation], 2, ckpt_path=latest(tmp_path))
    assert evaluation.after is None
    evaluation.finish(trainer, module)
    evaluation.finish(trainer, module)
    assert len(module.played) == 1
    assert evaluation.after is not None


def test_off(make: SimpleNamespace, tmp_path: Path) -> None:
    module = make.Toy()
    off = Evaluation(make.Suite(), tmp_path, EvalSection(episodes=0, every=0))
    make.fit(module, tmp_path, [make.Collector(), off], 1)
    assert module.played == []


def test_counts_leave_broken_episodes_out(make: SimpleNamespace) -> None:
    def play(tasks: object, *_: object) -> list[RolloutGroup]:
        one, two = make.task("a", "one_hop"), make.task("b", "one_hop")
        won = make.trajectory(one, True, [make.turn(), make.turn(valid=False), make.turn()])
        return [
            RolloutGroup(one, (won,)),
            RolloutGroup(two, (make.trajectory(two, False, stop=Stop.ERROR),)),
        ]

    result = evaluate(make.Suite(), [], play, split="test", temperature=1.0)
    found = result.types["one_hop"]
    assert found == Tally(
        n=1, tasks=1, turns=3, valid_turns=2, broken=1, values={SUCCESS: Sums(1, 1)}
    )
    assert (found.turns_mean, found.valid_action_frac) == (3, 2 / 3)
    assert result.row("val") == {
        "val/success_frac": 1,
        "val/macro_success_frac": 1,
        "val/search/one_hop/success_frac": 1,
    }


def test_nothing_played_has_no_success_key(make: SimpleNamespace) -> None:
    result = evaluate(make.Suite(), [], lambda *_: [], split="val", temperature=1.0)
    assert result.row("val") == {}


def test_chosen_tasks_are_the_same_and_not_the_first(make: SimpleNamespace) -> None:
    chosen = [task.id for task in choose(make.Suite(), "test", 10)]
    assert chosen == [task.id for task in choose(make.Suite(), "test", 10)]
    assert chosen != [f"test-{i}" for i in range(10)]
    assert len(choose(make.Suite(), "test", 500)) == 20


class Shuffled:
    """The test tasks in another order, with one more type between them and one task twice."""

    def __init__(self, suite: Any) -> None:
        self.suite = suite

    def tasks(self, split: str) -> list[Task]:
        tasks = self.suite.tasks(split)
        more = [Task(f"more-{i}", "search", "three_hop", {}) for i in range(3)]
        return [*reversed(tasks), *more, tasks[0]]


def test_tasks_per_type_depend_on_their_ids_alone(make: SimpleNamespace) -> None:
    chosen = choose_per_type(make.Suite(), "test", 4)
    assert Counter(task.type for task in chosen) == {"one_hop": 4, "two_hop": 4}
    assert [task.id for task in chosen] != [f"test-{i}" for i in range(8)]
    again = choose_per_type(cast("Any", Shuffled(make.Suite())), "test", 4)
    assert {t.id for t in again if t.type != "three_hop"} == {t.id for t in chosen}
    assert len(again) == 11
    assert len(choose_per_type(make.Suite(), "test", 500)) == 20


def test_blocks_change_nothing(make: SimpleNamespace) -> None:
    suite, seen = make.Suite(), []
    how = {"split": "test", "temperature": 0.5, "samples": 3}
    tasks = suite.tasks("test")
    whole = evaluate(suite, tasks, make.Toy().play, **how)
    module = make.Toy()
    parts = evaluate(suite, tasks, module.play, block=7, on_groups=seen.append, **how)
    assert [(len(ids), n) for ids, _, n, _, _ in module.played] == [(7, 3), (7, 3), (6, 3)]
    assert [group.task.id for groups in seen for group in groups] == [task.id for task in tasks]
    assert parts.types == whole.types
    assert (whole.overall.n, whole.overall.tasks) == (60, 20)


def test_tasks_that_repeat_one_another_are_taken_together(make: SimpleNamespace) -> None:
    """In one block, and whatever the blocks are."""

    class Drawn(make.Suite):  # type: ignore[misc]
        def cluster(self, task: Task) -> str:
            return f"{int(task.id.removeprefix('test-')) % 14}"

    tasks, how = Drawn().tasks("test"), {"split": "test", "temperature": 0.5}
    whole = evaluate(Drawn(), tasks, make.Toy().play, **how)
    module = make.Toy()
    parts = evaluate(Drawn(), tasks, module.play, block=5, **how)
    assert parts.types == whole.types
    assert [len(ids) for ids, *_ in module.played] == [10, 6, 4]
    assert whole.overall.tasks == 20
    assert whole.overall.repeats == 2 * 6


def test_broken_episodes_of_all_blocks_count(make: SimpleNamespace) -> None:
    def play(tasks: list[Task], *_: object) -> list[RolloutGroup]:
        stops = [Stop.ERROR if task.id == "test-19" else Stop.DONE for task in tasks]
        return [
            RolloutGroup(task, (make.trajectory(task, stop=stop),))
            for task, stop in zip(tasks, stops, strict=True)
        ]

    how = {"split": "test", "temperature": 1.0, "block": 5}
    tasks = make.Suite().tasks("test")
    assert evaluate(make.Suite(), tasks, play, max_error_frac=0.05, **how).overall.broken == 1
    with pytest.raises(EnvironmentFault, match=r"test: 1 of 20 episodes broke.*boom"):
        evaluate(make.Suite(), tasks, play, max_error_frac=0.04, **how)


def test_an_evaluation_that_only_breaks_stops_early(
    make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "ENOUGH", 6)
    played = []

    def play(tasks: list[Task], *_: object) -> list[RolloutGroup]:
        played.extend(tasks)
        return [RolloutGroup(t, (make.trajectory(t, stop=Stop.ERROR),)) for t in tasks]

    how = {"split": "test", "temperature": 1.0, "block": 4, "max_error_frac": 0.9}
    with pytest.raises(EnvironmentFault, match=r"test: 8 of 8 episodes broke.*boom"):
        evaluate(make.Suite(), make.Suite().tasks("test"), play, **how)
    assert len(played) == 8


def test_the_table_shows_intervals_and_change() -> None:
    before = EvalResult("search", "test", 1.0, {"one_hop": tally(10, 0), "two_hop": Tally()}, 1)
    after = EvalResult("search", "test", 1.0, {"one_hop": tally(10, 8), "two_hop": Tally()}, 1)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(before, after))
    lines = console.export_text().splitlines()
    row = next(line for line in lines if "one_hop" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "one_hop",
        "10",
        "0.0%",
        "0.0 - 27.8",
        "80.0%",
        "49.0 - 94.3",
        "+80.0",
    ]
    empty = next(line for line in lines if "two_hop" in line)
    assert [cell.strip() for cell in empty.strip("│").split("│")][-1] == "-"
    for average in ("sample average", "macro average"):
        assert any(average in line and "+80.0" in line for line in lines)
