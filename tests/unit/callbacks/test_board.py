"""What a person sees in TensorBoard, read back from the event files of a run."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from rsipo_lightning.callbacks import markup
from rsipo_lightning.callbacks.logging import MetricsLogger
from rsipo_lightning.callbacks.rollout_stats import add_replays, add_rollouts
from rsipo_lightning.callbacks.skills import SkillCategory
from rsipo_lightning.callbacks.transcripts import Transcripts
from rsipo_lightning.types import Iteration

EVIL = "<script>alert(1)</script> [x](javascript:alert(1)) | a\n\n# not a heading & more"


class Rows:
    def __init__(self) -> None:
        self.started_after: list[int] = []
        self.rows: list[tuple[int, dict[str, float]]] = []

    def truncate_after(self, update: int) -> None:
        self.started_after.append(update)

    def write(self, update: int, row: dict[str, float]) -> None:
        self.rows.append((update, row))


@pytest.fixture(scope="module")
def run(make: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    rows = Rows()

    def fill(it: Iteration) -> None:
        # update 1: one success of two; update 2: both
        it.groups = [make.group(make.task("a"), [True, it.update > 0])]
        skill = make.skill(make.task("a"), EVIL)
        it.skills = [skill]
        it.replays = [make.replay(skill, [True, True], [False, True], 0.25)]
        it.trust = {"a": 1.5}
        add_rollouts(it.metrics, it.groups)
        add_replays(it.metrics, it.replays)
        it.metrics.mean("trust/omega_mean", 1.5)

    class Versioned(make.Toy):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            self.iteration.metrics.total("loss/total", float(loss.detach()))
            return loss

    callbacks = [
        make.Collector(fill),
        SkillCategory(),
        Transcripts(folder, groups=1),
        MetricsLogger([rows]),
    ]
    make.fit(Versioned(), folder, callbacks, 2)
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return SimpleNamespace(events=events, rows=rows)


def text(run: Any, tag: str) -> list[tuple[int, str]]:
    shown = run.events.Tensors(f"{tag}/text_summary")
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in shown]


def test_scalars_stand_at_the_update_they_belong_to(run: Any) -> None:
    def scalar(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in run.events.Scalars(tag)]

    assert scalar("rollout/success_frac") == [(1, 0.5), (2, 1.0)]
    assert scalar("replay/gain_mean") == [(1, 0.25), (2, 0.25)]
    assert scalar("progress/policy_version") == [(1, 1.0), (2, 2.0)]
    assert scalar("skill/procedural_frac") == [(1, 1.0), (2, 1.0)]
    assert [step for step, _ in scalar("loss/total")] == [1, 2]


def test_writers_get_the_same_rows(run: Any) -> None:
    assert run.rows.started_after == [0]
    assert [update for update, _ in run.rows.rows] == [1, 2]
    row = run.rows.rows[1][1]
    tags = {tag for tag in run.events.Tags()["scalars"] if tag != "epoch"}
    assert set(row) == tags
    assert row["rollout/success_frac"] == 1.0


def test_the_first_page_has_four_tabs_whose_charts_find_their_lines(run: Any) -> None:
    (event,) = run.events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [tab.title for tab in layout.category] == [
        "Success",
        "RSIPO",
        "Losses",
        "Engine & time",
    ]

    def lines(tab: int, chart: str) -> set[str]:
        charts = {c.title: c.multiline.tag for c in layout.category[tab].chart}
        scalars = run.events.Tags()["scalars"]
        return {s for s in scalars for regex in charts[chart] if re.fullmatch(regex, s)}

    assert lines(0, "rollouts and held-out tasks") == {"rollout/success_frac"}
    assert lines(0, "rollouts by task type") == {"rollout/search/two_hop/success_frac"}
    assert lines(1, "replay gain") == {"replay/gain_mean", "skill/procedural/gain_mean"}
    assert lines(1, "trust") == {"trust/omega_mean"}
    assert len(lines(1, "skill categories")) == 4
    assert len(lines(1, "teacher against student")) == 2
    assert lines(2, "losses") == {"loss/total"}
    assert lines(3, "policy version") == {"progress/policy_version"}


def test_the_latest_skills_are_a_table_in_which_nothing_runs(run: Any) -> None:
    (_, first), (step, _) = text(run, "skills/latest")
    assert step == 2
    page = markdown_to_safe_html(first)
    assert "<td>procedural</td>" in page
    assert "<td>+0.250</td>" in page
    assert "<td>1.50</td>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:alert(1)) | a<br>" in page
    assert not re.search(r"<script|<a |<h1|&amp;lt;", page)


def test_the_transcript_shows_student_and_replay_with_the_gain(run: Any) -> None:
    (step, first), _ = text(run, "transcript/student_and_replay")
    assert step == 1
    page = markdown_to_safe_html(first)
    assert "student: a (two_hop), success" in page
    assert "replay with this skill, gain +0.250: a (two_hop), success" in page
    assert "&lt;b&gt;prompt&lt;/b&gt; of 3 tokens" in page
    assert "&lt;answer&gt;x&lt;/answer&gt;" in page
    assert not re.search(r"<script|<a |<h1|<answer|<b>|&amp;lt;", page)


def test_blank_lines_do_not_end_a_block() -> None:
    page = markdown_to_safe_html(
        markup.page(markup.block("a\n\n* b\n\n    c"), markup.heading("x\ny"))
    )
    assert "<pre>a\n\n* b\n\n    c</pre>" in page
    assert "<h4>x y</h4>" in page


def test_control_characters_are_shown_as_boxes() -> None:
    assert markup.block("a\x1b[31m\x00b") == "<pre>a\ufffd[31m\ufffdb</pre>"
