"""``rsipo-sft`` as a user runs it: exit codes, files, and the folder that RL starts from."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rsipo_lightning import web
from rsipo_lightning.cli import eval_main, fit_main, sft_main
from rsipo_lightning.composing import SFT, compose_kind
from rsipo_lightning.environments.search import SearchSuite
from rsipo_lightning.run_folder import RunFolder
from rsipo_lightning.tiny import NUMBERS, build_tokenizer, new_model

ROOT = Path(__file__).parents[2]
GOOD = ["--env", "search"]
SMALL = ("rollout.tasks=6", "rollout.group=2", "sft.epochs=1")
SKILL = json.dumps({"episode_summary": "won", "episode_skill": "first search, then answer it"})
HOUSE = ["--env", "alfworld", "--sft", "tiny_alfworld"]
ENDPOINT = ("sft.labels=endpoint", "sft.endpoint.model=m", "sft.endpoint.concurrency=1")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "PAUSE_S", 0.01)


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())["result"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "choose an environment: --env NAME"),
        ([*GOOD, "--sft", "sead"], "no recipe 'sead'; did you mean 'seed'?"),
        ([*GOOD, "--algo", "grpo"], "no flag --algo"),
        ([*GOOD, "--resume", "x"], "no flag --resume"),
        ([*GOOD, "sft.epoch=1"], "no key 'sft.epoch'; did you mean 'sft.epochs'?"),
        ([*GOOD, "trainer.updates=3"], "no key 'trainer.updates'"),
        ([*GOOD, "eval.episodes=3"], "no key 'eval'"),
        ([*GOOD, "sft.actor=human"], "sft.actor=human: must be one of expert, policy"),
        ([*GOOD, "sft.labels=none"], "sft.labels=none: must be one of scripted, endpoint, file"),
        ([*GOOD, "sft.labels=file"], "sft.labels=file needs sft.labels_file=FILE"),
        ([*GOOD, "sft.labels_file=x"], "set sft.labels=file or endpoint to use it"),
        ([*GOOD, "sft.labels=file", "sft.labels_file=x"], "x: cannot be read (No such file"),
        ([*GOOD, "sft.labels=file", "sft.labels_file=/dev/null"], "/dev/null: holds no labels"),
        ([*GOOD, "sft.lessons=1", "sft.actor=policy"], "sft.lessons are instead of episodes"),
        ([*GOOD, "--sft", "seed", "sft.lessons=1"], "leave out actor, labels, actions"),
        ([*GOOD, "sft.endpoint.url=http://h"], "set sft.labels=endpoint to use it"),
        ([*GOOD, "sft.epochs=0"], "sft.epochs=0: must be at least 1"),
        ([*GOOD, "sft.batch=0"], "sft.batch=0: must be at least 1"),
        ([*GOOD, "sft.val_frac=1"], "sft.val_frac=1.0: must be at least 0 and below 1"),
        ([*GOOD, "sft.val_frac=nan"], "sft.val_frac=nan: must be"),
        ([*GOOD, "sft.actions=-1"], "sft.actions=-1.0: must be at least 0"),
        ([*GOOD, "sft.actions=1", "sft.actor=policy"], "it needs sft.actor=expert"),
        ([*GOOD, "sft.skill_temperature=-1"], "sft.skill_temperature=-1.0: must be at least 0"),
        ([*GOOD, "sft.lessons=-1"], "sft.lessons=-1: must be at least 0"),
        ([*GOOD, "sft.report=-1"], "sft.report=-1: must be at least 0"),
        ([*GOOD, "sft.endpoint=1"], "sft.endpoint is a section"),
        ([*GOOD, *ENDPOINT], "sft.endpoint.url is missing"),
        ([*GOOD, "--sft", "seed"], "sft.endpoint.url is missing"),
        ([*GOOD, "sft.endpoint.timeout_s=0"], "sft.endpoint.timeout_s=0: must be above 0"),
        ([*GOOD, "sft.endpoint.retries=-1"], "sft.endpoint.retries=-1: must be at least 0"),
        ([*GOOD, "sft.endpoint.concurrency=0"], "sft.endpoint.concurrency=0: must lie between"),
        ([*GOOD, "sft.endpoint.max_tokens=0"], "sft.endpoint.max_tokens=0: must be at least 1"),
        ([*GOOD, "sft.endpoint.temperature=3"], "sft.endpoint.temperature=3.0: must lie between"),
        ([*GOOD, *ENDPOINT, "sft.endpoint.url=h:1"], "sft.endpoint.url='h:1': must be http"),
        (
            [*GOOD, *ENDPOINT, "sft.endpoint.url=http://h", "sft.endpoint.key_env=NO_SUCH"],
            "sft.endpoint.key_env='NO_SUCH': the environment variable is not set",
        ),
        (
            [*GOOD, *ENDPOINT, "sft.endpoint.url=http://127.0.0.1:1/v1"],
            "sft.endpoint.url=http://127.0.0.1:1/v1: ConnectionRefused",
        ),
        ([*GOOD, "rollout.tasks=1"], "rollout.tasks=1: with sft.val_frac=0.1 none is left"),
        ([*GOOD, "rollout.tasks=4000"], "there are only 3200 training tasks"),
        ([*GOOD, "rollout.context=30"], "rollout.context=30: a first prompt and a turn"),
        ([*GOOD, "model.dtype=bfloat16"], "train in float32"),
        ([*GOOD, "--model", "hf"], "--model hf needs model.path="),
        ([*GOOD, "run.dir=."], ". exists; choose another run.dir"),
        ([*GOOD, "env.questions=QUESTIONS"], "have no scripted expert: set sft.actor=policy"),
        (
            [*GOOD, "env.questions=QUESTIONS", "sft.actor=policy"],
            "have no scripted skills: set sft.labels=endpoint or file",
        ),
        ([*GOOD, "env.questions=QUESTIONS", "sft.lessons=1"], "sft.lessons are of the built-in"),
        ([*GOOD, "--sft", "tiny_alfworld"], "sft.lessons of tiny_alfworld are of --env alfworld"),
        ([*HOUSE, "env.context=append"], "are of --env alfworld, env.context=window"),
        ([*HOUSE, "model.path=tiny"], "not that of tiny; use model.path=untrained_alfworld or"),
    ],
)
def test_what_cannot_start_is_one_line_and_writes_nothing(
    argv: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "env.questions=QUESTIONS" in argv:
        rows = [{"id": str(i), "question": f"Who is {i}?", "answers": ["Ada"]} for i in range(300)]
        Path("q.jsonl").write_text("\n".join(map(json.dumps, rows)))
        Path("c.jsonl").write_text(json.dumps({"id": "1", "title": "Ada", "text": "Ada is 7."}))
        argv = ["env.questions=q.jsonl" if a == "env.questions=QUESTIONS" else a for a in argv]
        argv.append("env.corpus=c.jsonl")
    before = sorted(tmp_path.rglob("*"))
    assert sft_main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rsipo-sft: error: ")
    assert says in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("status", [401, 404])
def test_a_key_or_model_that_is_refused_costs_no_episode(
    status: int, chat_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_server.answer = lambda handler, request: chat_server.send(handler, {"error": "no"}, status)
    assert sft_main([*GOOD, *ENDPOINT, f"sft.endpoint.url={chat_server.url}"]) == 2
    err = capsys.readouterr().err
    assert f"sft.endpoint.url={chat_server.url}: HTTP {status}" in err
    assert len(chat_server.requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_stage_1_is_started_again_and_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_kind(SFT, {"env": "search"}, None, ["run.dir=run"]).config
    RunFolder.create(config, ["rsipo-sft"])
    assert fit_main(["--resume", "run"]) == 2
    assert "run is of stage 1: rsipo-sft --config run/config.yaml starts" in capsys.readouterr().err


def test_an_unfinished_run_is_not_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_kind(SFT, {"env": "search"}, None, ["run.dir=run"]).config
    RunFolder.create(config, ["rsipo-sft"])
    assert eval_main(["run"]) == 2
    says = "run is not finished, it has no policy/ yet: rsipo-sft --config run/config.yaml"
    assert says in capsys.readouterr().err


def test_print_config_makes_the_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft_main([*GOOD, "--sft", "seed", "--print-config", "seed=5"]) == 0
    text = capsys.readouterr().out
    for value in ("actor: policy", "labels: endpoint", "epochs: 3", "batch: 8", "val_frac: 0.1"):
        assert value in text
    Path("mine.yaml").write_text(text)
    assert sft_main(["--config", "mine.yaml", "--print-config"]) == 0
    again = capsys.readouterr().out
    assert re.sub(" *#.*", "", again) == re.sub(" *#.*", "", text)


def test_seed_is_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    """methods.md 5.12, for a model of its size."""
    argv = [*GOOD, "--sft", "seed", "--model", "hf", "--print-config"]
    assert sft_main(argv) == 0
    text = re.sub(" *#.*", "", capsys.readouterr().out)
    for line in ("tasks: 180", "group: 8", "temperature: 0.4", "context: 8192", "lr: 5.0e-06"):
        assert f"\n  {line}\n" in text
    for line in ("temperature: 0.0", "max_tokens: 4096"):  # of the labels
        assert f"\n    {line}\n" in text


def test_an_endpoint_from_end_to_end(chat_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It dies in the middle: 75, and a line that pays for the missing labels only."""

    def answer(handler: Any, request: dict[str, Any]) -> None:
        if "episode_skill" not in request["messages"][0]["content"]:
            chat_server.say(handler, "yes")  # the question before work starts
        elif len(chat_server.requests) > 6:
            chat_server.send(handler, {"error": "no credit"}, 402)
        else:
            chat_server.say(handler, SKILL)

    chat_server.answer = answer
    where = f"sft.endpoint.url={chat_server.url}"
    argv = [*GOOD, *SMALL, *ENDPOINT, where, "sft.actor=policy", "env.prompt=full"]
    more = ["rollout.max_new_tokens=8", "rollout.max_skill_tokens=8", "run.dir=first"]
    assert sft_main([*argv, *more]) == 75
    err = capsys.readouterr().err
    assert "HTTP 402" in err
    assert len(jsonl(Path("first/labels.jsonl"))) == 5
    assert not Path("first/policy").exists()

    chat_server.requests.clear()
    chat_server.answer = lambda handler, request: chat_server.say(handler, SKILL)
    program, *again = shlex.split(err.split("start again with: ")[1])
    assert program == "rsipo-sft"
    assert sft_main([*again, "run.dir=second"]) == 0
    assert len(chat_server.requests) == 1 + 12 - 5
    done = result(Path("second"))
    assert (done["episodes"], done["labels"]) == (12, 12)
    assert done["rows"] == {"train": 10, "held_out": 2}
    assert done["after"]["loss"] < done["before"]["loss"]
    assert "Skills of 2 unseen episodes" in capsys.readouterr().out


def test_a_sigterm_while_labels_are_paid_for(
    chat_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those on their way are kept, and the line says how to use them."""

    def answer(handler: Any, request: dict[str, Any]) -> None:
        if len(chat_server.requests) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        chat_server.say(handler, SKILL)

    before = signal.getsignal(signal.SIGTERM)
    chat_server.answer = answer
    argv = [*GOOD, *SMALL, *ENDPOINT, f"sft.endpoint.url={chat_server.url}", "run.dir=run"]
    assert sft_main(argv) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: stopped by SIGTERM; start again with: rsipo-sft --config run/config" in line
    assert line.endswith(" sft.labels_file=run/labels.jsonl")
    assert 3 <= len(jsonl(Path("run/labels.jsonl"))) < 12
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_disk_that_fills_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on the size of files stands for it, from the first label on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    hindsight = SearchSuite.hindsight

    def fills(self: SearchSuite, trajectory: Any, rng: Any) -> str:
        if trajectory.turns:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        return hindsight(self, trajectory, rng)

    monkeypatch.setattr(SearchSuite, "hindsight", fills)
    try:
        assert sft_main([*GOOD, *SMALL, "run.dir=run"]) == 75
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write to run: File too large; make room" in line
    assert "start again with: rsipo-sft --config run/config.yaml" in line


@pytest.mark.slow
def test_a_sigterm_says_how_to_start_again() -> None:
    command = [sys.executable, "-c", "import sys; from rsipo_lightning.cli import sft_main as m; "]
    command[-1] += "sys.exit(m(sys.argv[1:]))"
    process = subprocess.Popen(
        [*command, *GOOD, "rollout.tasks=4", "sft.epochs=500", "run.dir=run"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not Path("run/metrics.csv").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "start again with: rsipo-sft --config run/config.yaml" in err


@pytest.mark.slow
def test_a_policy_of_stage_1_is_what_rl_starts_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls, equal configs give equal weights, and all three commands take the folder."""
    argv = [*GOOD, "rollout.tasks=12", "rollout.group=4", "sft.actor=policy", "seed=3"]
    assert sft_main([*argv, "run.dir=one"]) == 0
    one = result(Path("one"))
    assert one["episodes"] == one["labels"] == 48
    assert one["after"]["loss"] < one["before"]["loss"]
    assert one["after"]["parsed"] == one["after"]["valid"] == one["after"]["episodes"] == 4
    out = capsys.readouterr().out
    assert "48 episodes" in out
    assert "parsed" in out
    with Path("one/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss/imitate"]) < float(rows[0]["loss/imitate"])
    assert len([row for row in rows if row["val/loss"]]) == 3  # one an epoch
    assert {row["role"] for row in jsonl(Path("one/trajectories.jsonl"))} == {"policy"}

    assert sft_main(["--config", "one/config.yaml", "run.dir=two"]) == 0
    a, b = weights(Path("one/policy")), weights(Path("two/policy"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    labels = "sft.labels_file=one/labels.jsonl"
    assert sft_main([*argv, "sft.labels=file", labels, "run.dir=three"]) == 0
    assert jsonl(Path("three/labels.jsonl")) == jsonl(Path("one/labels.jsonl"))

    small = ["trainer.updates=1", "rollout.tasks=2", "eval.episodes=4", "eval.every=0"]
    fit = ["--algo", "rsipo", "--env", "search", "model.path=one/policy", *small, "run.dir=rl"]
    assert fit_main(fit) == 0
    record = json.loads(Path("rl/run.json").read_text())
    assert record["groups"]["model"] == "tiny"
    for path in ("one", "one/policy"):
        assert eval_main([path, "--episodes", "3"]) == 0


@pytest.mark.slow
def test_lessons_are_what_made_the_tiny_policy() -> None:
    """Equal runs give equal weights; the report is in run.json."""
    argv = [*GOOD, "--sft", "tiny", "sft.lessons=3", "sft.report=1"]
    assert sft_main([*argv, "run.dir=one"]) == 0
    assert sft_main([*argv, "run.dir=two"]) == 0
    a, b = weights(Path("one/policy")), weights(Path("two/policy"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert set(result(Path("one"))["report"]) >= {"none", "procedural", "its own"}


@pytest.mark.slow
def test_lessons_of_alfworld_start_from_random_weights() -> None:
    """Without --model: those of the seed, not those of the shipped policy."""
    assert sft_main([*HOUSE, "sft.lessons=1", "sft.report=0", "optim.lr=1e-9", "run.dir=run"]) == 0
    made = weights(Path("run/policy"))
    assert "path: untrained_alfworld" in Path("run/config.yaml").read_text()
    for name, tensor in new_model(build_tokenizer(NUMBERS), seed=1).state_dict().items():
        assert torch.allclose(made[name], tensor, atol=1e-7)
