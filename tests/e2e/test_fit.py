"""``rsipo-fit`` as a user runs it: the tiny policy, the built-in world, all files read back."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rsipo_lightning import compose, fit, registry
from rsipo_lightning.callbacks.checkpoints import Checkpoints
from rsipo_lightning.cli import eval_main, fit_main
from rsipo_lightning.engines.hf import HFConfig, HFEngine
from rsipo_lightning.environments.retriever import BM25Retriever
from rsipo_lightning.policy import Policy
from rsipo_lightning.protocols import Host
from rsipo_lightning.sharding import plain_copy
from rsipo_lightning.types import Completion, Prompt

ROOT = Path(__file__).parents[2]
SMALL = (
    "trainer.updates=2",
    "rollout.tasks=4",
    "eval.episodes=12",
    "eval.every=2",
    "eval.val_episodes=8",
)
NAMES = (  # promised to tools
    "rollout/success_frac",
    "rollout/valid_action_frac",
    "rollout/turns_mean",
    "loss/total",
    "loss/actor",
    "policy/kl_mean",
    "policy/mismatch_kl_mean",
    "optim/grad_norm",
    "time/rollout_s",
    "time/update_s",
    "time/forwards_count",
    "time/forward_tokens",
    "progress/policy_version",
    "val/success_frac",
)
RSIPO_NAMES = (
    "replay/gain_mean",
    "replay/teacher_better_frac",
    "replay/teacher_worse_frac",
    "trust/omega_mean",
    "skill/valid_frac",
    "skill/procedural_frac",
    "skill/format_frac",
    "skill/recovery_frac",
    "skill/other_frac",
    "loss/teacher",
    "loss/writer",
    "time/replay_s",
)


def run(algo: str, folder: Path, *more: str) -> Path:
    assert fit_main(["--algo", algo, "--env", "search", *SMALL, f"run.dir={folder}", *more]) == 0
    return folder


@pytest.mark.slow
def test_rsipo_without_its_terms_is_grpo_and_costs_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same forwards, tokens and calls of the engine, and the same weights."""
    calls: list[int] = []
    generate = HFEngine.generate

    def counted(self: HFEngine, prompts: Sequence[Prompt]) -> list[Completion]:
        calls.append(len(prompts))
        return generate(self, prompts)

    monkeypatch.setattr(HFEngine, "generate", counted)
    off = ("algo.distill=0", "algo.skill=0")
    found = []
    for name, keys in (("grpo", ()), ("rsipo", off), ("rsipo", ())):
        calls.clear()
        folder = run(name, tmp_path / f"{name}{len(keys)}", *keys)
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        work = [(row["time/forwards_count"], row["time/forward_tokens"]) for row in rows]
        found.append((work, tuple(calls), (folder / "policy/model.safetensors").read_bytes()))
    grpo, without, whole = found
    assert without == grpo
    for one, other in zip(whole, grpo, strict=True):
        assert one != other


def metrics(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without ``time/*``, the only columns that may differ between equal runs."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished RSIPO run that several tests look at."""
    return run("rsipo", tmp_path_factory.mktemp("runs") / "rsipo")


def test_a_run_writes_what_it_promises(done: Path) -> None:
    record = json.loads((done / "run.json").read_text())
    assert record["command"].startswith("rsipo-fit --algo rsipo --env search trainer.updates=2")
    assert record["versions"]["torch"] == torch.__version__
    assert record["result"]["updates"] == 2
    assert record["result"]["after"]["overall"]["n"] == 12
    assert record["data"]["source"] == "world"
    assert record["cpu_s"] > 0
    assert not (done / "hparams.yaml").exists()
    rows = metrics(done)
    assert [row["update"] for row in rows] == ["1", "2"]
    played = jsonl(done / "trajectories.jsonl")
    assert {row["role"] for row in played} == {"eval", "student", "replay"}
    written = jsonl(done / "skills.jsonl")
    assert len(written) == 8  # one per task and update
    assert {"text", "category", "type", "gain", "trust", "valid"} <= written[0].keys()
    assert sorted(p.name for p in (done / "checkpoints").iterdir()) == [
        "update-000001.ckpt",
        "update-000001.skills.json",
        "update-000002.ckpt",
        "update-000002.skills.json",
    ]
    best = json.loads((done / "best_skills.json").read_text())["task_specific_skills"]
    gains = {(row["type"], row["text"]): row["gain"] for row in written if row["gain"]}
    for kind, rows in best.items():
        for row in rows:
            assert row["gain"] == gains[kind, row["principle"]] > 0


def test_tensorboard_has_the_promised_names(done: Path) -> None:
    events = EventAccumulator(str(done))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    missing = {*NAMES, *RSIPO_NAMES} - tags
    assert not missing
    assert any(tag.startswith("rollout/search/bridge") for tag in tags)
    assert any(tag.startswith("trust/") and tag.count("/") == 2 for tag in tags)
    assert [point.step for point in events.Scalars("loss/total")] == [1, 2]
    versions = [point.value for point in events.Scalars("progress/policy_version")]
    assert versions == [1.0, 2.0]
    texts = {tag.split("/text_summary")[0] for tag in events.Tags()["tensors"]}
    assert {"transcript/student_and_replay", "skills/latest"} <= texts


def test_the_policy_folder_is_the_trained_policy(done: Path) -> None:
    """It loads like any model, its weights are those of the last checkpoint and moved from the
    start.
    """
    state = torch.load(done / "checkpoints" / "update-000002.ckpt", weights_only=True)
    trained = {k.removeprefix("policy.model."): v for k, v in state["state_dict"].items()}
    exported = weights(done)
    assert all(torch.equal(trained[name], value) for name, value in exported.items())
    start = AutoModelForCausalLM.from_pretrained(ROOT / "rsipo_lightning/models/tiny").state_dict()
    assert any(not torch.equal(start[name], value) for name, value in exported.items())
    tokenizer = AutoTokenizer.from_pretrained(done / "policy")
    assert tokenizer.decode(tokenizer.encode("Ünïcode, 漢字 & 🙂")) == "Ünïcode, 漢字 & 🙂"


def test_checkpoints_hold_the_type_moments(done: Path) -> None:
    state = torch.load(done / "checkpoints" / "update-000002.ckpt", weights_only=True)
    moments = state["rsipo"]["algorithm"]["shrinkage"]
    assert "*" in moments
    assert moments["*"]["n"] > 0


def test_its_config_makes_the_run_again_and_another_seed_another(
    done: Path, tmp_path: Path
) -> None:
    """Same seed and threads: identical metrics but for time/*, tokens and weights."""
    config = str(done / "config.yaml")
    assert fit_main(["--config", config, f"run.dir={tmp_path / 'again'}"]) == 0
    assert metrics(tmp_path / "again") == metrics(done)
    assert jsonl(tmp_path / "again" / "trajectories.jsonl") == jsonl(done / "trajectories.jsonl")
    again, first = weights(tmp_path / "again"), weights(done)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert fit_main(["--config", config, f"run.dir={tmp_path / 'other'}", "seed=1"]) == 0
    assert metrics(tmp_path / "other") != metrics(done)


def test_engine_and_trainer_agree(done: Path) -> None:
    """fp32: the largest difference of a sampled token's log-prob between engine and trainer."""
    assert all(float(row["policy/mismatch_max"]) < 1e-5 for row in metrics(done))


@pytest.mark.parametrize(
    ("algo", "keys"), [("grpo", ()), ("rsipo", ()), ("step_opsd", ("algo.refresh=2",))]
)
def test_resume_is_exact(algo: str, keys: Sequence[str], tmp_path: Path) -> None:
    """Four updates, and two, a resume and two more: the same metrics, transcripts and weights.

    StepOPSD's teacher is a copy of the policy, from update 2 on that of its end.
    """
    straight = run(algo, tmp_path / "straight", "trainer.updates=4", *keys)
    parts = run(algo, tmp_path / "parts", "log.loggers=[tensorboard,csv]", *keys)
    assert fit_main(["--resume", str(parts), "trainer.updates=4"]) == 0
    assert metrics(parts) == metrics(straight)
    assert [r for r in jsonl(parts / "trajectories.jsonl") if r["role"] != "eval"] == [
        r for r in jsonl(straight / "trajectories.jsonl") if r["role"] != "eval"
    ]
    one, other = weights(straight), weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    looks = [json.loads((f / "eval.json").read_text()) for f in (straight, parts)]
    assert [look["after"]["updates"] for look in looks] == [4, 4]  # not the look after update 2
    assert looks[0]["after"]["overall"] == looks[1]["after"]["overall"]
    events = EventAccumulator(str(parts))
    events.Reload()
    assert [p.step for p in events.Scalars("loss/total")] == [1, 2, 3, 4]
    best = [(f / "best_skills.json") for f in (straight, parts)]
    if algo != "rsipo":  # no replays, so no gains
        assert not any(path.exists() for path in best)
    else:
        assert best[0].read_text() == best[1].read_text()
    steps = {}
    for start in ("from-000001", "from-000003"):
        with (parts / "csv" / start / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["loss/total"]]
        steps[start] = [row["step"] for row in rows]
    assert steps == {"from-000001": ["1", "2"], "from-000003": ["3", "4"]}


def close(one: Path, other: Path, tolerance: float) -> None:
    """All metrics agree but for the order of sums."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"policy/mismatch_max", "policy/mismatch_kl_mean"}:
            assert float(a[key] or 0) == pytest.approx(
                float(b[key] or 0), abs=tolerance, rel=tolerance
            ), key


def test_micro_batches_do_not_change_the_run(done: Path, tmp_path: Path) -> None:
    """Through the real trainer: Lightning's scaling of losses included."""
    close(done, run("rsipo", tmp_path / "run", "trainer.micro_batches=3"), 1e-5)


def test_several_optimizer_steps_of_an_update(tmp_path: Path) -> None:
    """The ratio to the policy that sampled: the second step's surrogate is off-policy."""
    more = ("trainer.minibatches=2", "optim.lr=1e-3", "eval.episodes=0")
    one = run("grpo", tmp_path / "one", *more)
    two = run("grpo", tmp_path / "two", *more, "trainer.micro_batches=2")
    close(one, two, 1e-4)
    assert all(float(row["policy/mismatch_max"]) < 1e-5 for row in metrics(one))
    assert all(float(row["policy/ratio_max"]) > 1 for row in metrics(one))
    assert all(float(row["policy/update_kl_mean"]) > 0 for row in metrics(one))


def test_dropout_of_a_model_does_not_reach_the_run(tmp_path: Path) -> None:
    """The policy that is trained is the policy that sampled, and equal seeds give equal runs."""
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(ROOT / "rsipo_lightning/models/tiny")
    model.config.attention_dropout = 0.3
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "rsipo_lightning/models/tiny").save_pretrained(folder)
    more = (f"model.path={folder}", "eval.episodes=0", "eval.every=0")
    one = run("grpo", tmp_path / "one", "--model", "tiny", *more)
    assert all(float(row["policy/mismatch_max"]) < 1e-5 for row in metrics(one))
    assert metrics(one) == metrics(run("grpo", tmp_path / "two", "--model", "tiny", *more))


@pytest.mark.slow
def test_two_ranks_make_the_same_run_as_one(tmp_path: Path) -> None:
    """Gains, trust, losses and gradient norms on two gloo processes."""
    one = run("rsipo", tmp_path / "one")
    two = tmp_path / "two"
    command = [sys.executable, "-m", "rsipo_lightning", "--algo", "rsipo", "--env", "search"]
    subprocess.run(
        [*command, "--trainer", "ddp", "trainer.accelerator=cpu", *SMALL, f"run.dir={two}"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    close(one, two, 1e-5)
    kept = []
    for folder in (one, two):
        best = json.loads((folder / "best_skills.json").read_text())["task_specific_skills"]
        kept.append([(kind, row["principle"]) for kind, rows in best.items() for row in rows])
    assert kept[0] == kept[1] != []


def test_a_new_learning_rate_counts_after_a_resume(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    assert fit_main(["--resume", str(folder), "trainer.updates=3", "optim.lr=0.001"]) == 0
    state = torch.load(folder / "checkpoints" / "update-000003.ckpt", weights_only=True)
    assert [g["lr"] for g in state["optimizer_states"][0]["param_groups"]] == [0.001]
    assert float(metrics(folder)[-1]["optim/lr"]) == 0.001


def test_a_last_look_that_is_made_up_for_is_at_the_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine with weights of its own too, which no update has sent it."""
    sent = []

    class Copied(HFEngine):
        @classmethod
        def of(cls, config: HFConfig, host: Host) -> HFEngine:
            copied = Policy(plain_copy(host.policy.model, host.device))
            return cls(copied, host.tokenizer, own=False)

        def sync_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
            super().sync_weights(weights, version)
            sent.append(version)

    monkeypatch.setitem(registry.BUILTIN["engines"], "hf", "mine:Copied")
    monkeypatch.setitem(sys.modules, "mine", cast(Any, SimpleNamespace(Copied=Copied)))
    folder = run("grpo", tmp_path / "run", "trainer.updates=1", "eval.every=0")
    looks = json.loads((folder / "eval.json").read_text())
    after = looks.pop("after")
    (folder / "eval.json").write_text(json.dumps(looks))
    assert fit_main(["--resume", str(folder)]) == 0
    again = json.loads((folder / "eval.json").read_text())["after"]
    assert {k: x for k, x in again.items() if "seconds" not in k} == {
        k: x for k, x in after.items() if "seconds" not in k
    }
    assert sent == [0, 1, 1]


class Refuses(CSVLogger):
    """A service without a key."""

    def __init__(self, save_dir: str) -> None:
        raise RuntimeError("no key")


def test_a_resume_that_cannot_be_changes_nothing(
    done: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    before = (folder / "config.yaml").read_text(), (folder / "run.json").read_text()
    assert fit_main(["--resume", str(folder), "trainer.updates=1"]) == 2
    assert "has made 2 already" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mine", cast(Any, SimpleNamespace(Refuses=Refuses)))
    assert fit_main(["--resume", str(folder), "log.loggers=[mine.Refuses]"]) == 2
    assert "log.loggers=mine.Refuses: cannot start: no key" in capsys.readouterr().err
    assert before == ((folder / "config.yaml").read_text(), (folder / "run.json").read_text())


def test_a_run_that_diverges_stops_with_the_last_whole_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    argv = ["--algo", "grpo", "--env", "search", *SMALL, "eval.episodes=0", "optim.lr=1e8"]
    assert fit_main([*argv, f"run.dir={folder}"]) == 75
    err = capsys.readouterr().err
    assert "in update 2; lower optim.lr" in err
    assert "go on with: rsipo-fit --resume" in err


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("rollout.context=30", "rollout.context=30: a first prompt and a turn"),
        ("rollout.tasks=4000", "there are only 3200 training tasks"),
        ("model.dtype=bfloat16", "train in float32"),
        ("rollout.group=5", "even number"),
        ("env.invalid_penalty=nan", "env.invalid_penalty=nan"),
        ("optim.lr=inf", "optim.lr=inf"),
    ],
)
def test_what_cannot_run_is_one_line_and_writes_nothing(
    key: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--algo", "rsipo", "--env", "search", f"run.dir={tmp_path / 'run'}", key]
    assert fit_main(argv) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_model_does_not_get_the_tiny_policys_values(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But the policy of an earlier run keeps its preset, and --model hf alone is refused."""
    base = {"algo": "grpo", "env": "search"}
    assert compose(**base).optim.lr == 6e-4
    other = compose(**base, overrides=["model.path=some/llm"])
    assert (other.groups["model"], other.optim.lr, other.env.prompt) == ("hf", 1e-6, "full")
    own = compose(**base, overrides=[f"model.path={done / 'policy'}"])
    assert (own.groups["model"], own.env.prompt) == ("tiny", "compact")
    assert fit_main(["--algo", "grpo", "--env", "search", "--model", "hf"]) == 2
    assert "--model hf needs model.path=" in capsys.readouterr().err


@pytest.mark.parametrize("algo", ["vanilla", "skill_prompt"])
def test_a_method_without_a_term_ends_with_the_policy_it_began_with(
    algo: str, tmp_path: Path
) -> None:
    """Bit for bit, whatever the learning rate and the weight decay."""
    more = ("eval.episodes=0", "eval.every=0", "optim.lr=0.1", "optim.weight_decay=0.5")
    folder = run(algo, tmp_path / "run", *more)
    start = AutoModelForCausalLM.from_pretrained(ROOT / "rsipo_lightning/models/tiny").state_dict()
    assert all(torch.equal(start[name], value) for name, value in weights(folder).items())
    rows = metrics(folder)
    assert [row["loss/total"] for row in rows] == ["0.0", "0.0"]
    assert "loss/actor" not in rows[0]
    shown = jsonl(folder / "trajectories.jsonl")[0]["prompt"]
    assert ("Episode-Level Skill" in shown) == (algo == "skill_prompt")


def test_skill_grpo_has_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without skills at test (Skill-GRPO), which is the run's result, and with them (*)."""
    folder = run("skill_grpo", tmp_path / "run", "eval.val_episodes=4", "log.groups=1")
    looks = json.loads((folder / "eval.json").read_text())
    assert list(looks) == ["before", "before_skill", "after", "after_skill"]
    assert {"val/success_frac", "val_skill/success_frac"} <= set(metrics(folder)[1])
    result = json.loads((folder / "run.json").read_text())["result"]
    assert result["after_skill"]["overall"] == looks["after_skill"]["overall"]
    assert capsys.readouterr().out.count("Success on the same test tasks") == 2
    shown = [
        (row["role"], "Episode-Level Skill" in row["prompt"])
        for row in jsonl(folder / "trajectories.jsonl")
        if row["update"] == 0 or row["role"] == "student"
    ]
    students = [("student", True)] * 16
    assert shown == [("eval", False), ("eval", True), *students]
    capsys.readouterr()
    assert eval_main([str(folder), "--episodes", "12"]) == 0
    plain = looks["after"]["overall"]["success_frac"]
    assert f"{100 * plain:.1f}" in capsys.readouterr().out


def test_from_python(tmp_path: Path) -> None:
    config = compose(
        algo="grpo", env="search", overrides=[*SMALL, "trainer.updates=1", f"run.root={tmp_path}"]
    )
    result = fit(config)
    assert result.before is not None
    assert result.folder.parent == tmp_path / "search" / "grpo"
    assert (result.folder / "policy" / "config.json").is_file()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_leaves_a_run_that_can_be_resumed(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    """A real process, Ctrl-C or a scheduler's SIGTERM: exit code, checkpoint, and how to go on."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "rsipo_lightning", "--algo", "rsipo", "--env", "search"]
    process = subprocess.Popen(
        [*command, *SMALL, "trainer.updates=50", "eval.episodes=0", f"run.dir={folder}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not (folder / "metrics.csv").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert f"rsipo-fit --resume {folder}" in err
    made = len(metrics(folder))
    assert 1 <= made < 50
    kept = sorted(p.name for p in (folder / "checkpoints").glob("*.ckpt"))[-1]
    assert kept in (f"update-{made:06d}.ckpt", f"update-{made - 1:06d}.ckpt")
    assert fit_main(["--resume", str(folder), f"trainer.updates={made + 1}"]) == 0
    assert [row["update"] for row in metrics(folder)] == [str(i + 1) for i in range(made + 1)]


@pytest.mark.parametrize(
    ("sent", "code", "says", "where"),
    [
        (signal.SIGINT, 130, "stopped by Ctrl-C", (Console, "print")),
        (signal.SIGTERM, 143, "error: stopped by SIGTERM", (Console, "print")),
        (signal.SIGTERM, 143, "error: stopped by SIGTERM", (Checkpoints, "on_fit_start")),
    ],
)
def test_a_signal_before_the_first_checkpoint_leaves_nothing(
    sent: signal.Signals,
    code: int,
    says: str,
    where: tuple[Any, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*args: object, **kwargs: object) -> None:
        assert list(tmp_path.rglob("run.json"))
        os.kill(os.getpid(), sent)

    monkeypatch.setattr(*where, stopped)
    argv = ["--algo", "grpo", "--env", "search", *SMALL, f"run.root={tmp_path / 'runs'}"]
    assert fit_main(argv) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rsipo-fit: {says}"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_dead_retriever_stops_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not scored as reward 0: exit code 75, and the run goes on once the retriever is back."""
    search, calls = BM25Retriever.search, []

    def dies(self: BM25Retriever, queries: list[str], k: int) -> Any:
        calls.append(queries)
        if len(calls) > 4:  # in the rollouts of the second update
            raise ConnectionError("gone")
        return search(self, queries, k)

    monkeypatch.setattr(BM25Retriever, "search", dies)
    folder = tmp_path / "run"
    more = ("eval.episodes=0", "eval.every=0", "checkpoint.every=9")
    argv = ["--algo", "grpo", "--env", "search", *SMALL, *more, f"run.dir={folder}"]
    assert fit_main(argv) == 75
    err = capsys.readouterr().err
    assert "the retriever failed" in err
    assert "update-000001.ckpt" in err  # saved where it stopped, although checkpoint.every=9
    monkeypatch.setattr(BM25Retriever, "search", search)
    assert fit_main(["--resume", str(folder)]) == 0
    straight = run("grpo", tmp_path / "straight", *more)
    assert metrics(folder) == metrics(straight)


def test_eval_of_a_run_and_of_a_model(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's last look is found again; a plain model folder is taken as well."""
    capsys.readouterr()
    assert eval_main([str(done), "--episodes", "12"]) == 0
    after = json.loads((done / "eval.json").read_text())["after"]["overall"]
    assert f"{100 * after['success_frac']:.1f} (" in capsys.readouterr().out
    assert eval_main([str(done / "policy"), "--env", "search", "--episodes", "4"]) == 0
    assert "4" in capsys.readouterr().out
