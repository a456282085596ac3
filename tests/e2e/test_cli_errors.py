"""Mistakes at the command line: one line, the right exit code, nothing written."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rsipo_lightning
from rsipo_lightning.cli import eval_main, fit_main
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import EngineError
from rsipo_lightning.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
GOOD = ["--algo", "rsipo", "--env", "search"]
Error = Callable[..., str]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Error:
    """Run in this process; give the one line that was said."""

    def call(*argv: str, main: Callable[[Sequence[str]], int] = fit_main) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return err.strip()

    return call


class FakeBuild(ModuleType):
    """What ``rsipo_lightning.build`` offers to the command line."""

    def __init__(self) -> None:
        super().__init__("rsipo_lightning.build")
        self.calls: list[dict[str, Any]] = []
        self.act: Callable[[], Any] = lambda: None

    def fit(self, config: RunConfig, *, resume: str | None, command: list[str]) -> Any:
        self.calls.append({"config": config, "resume": resume, "command": command})
        return self.act()

    def evaluate(self, path: Path, config: RunConfig, **kwargs: Any) -> Any:
        self.calls.append({"path": path, "config": config, **kwargs})


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setitem(sys.modules, "rsipo_lightning.build", fake)
    monkeypatch.setattr(rsipo_lightning, "build", fake, raising=False)
    return fake


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "choose an environment: --env NAME (have: alfworld"),
        (["--env", "search"], "choose an algorithm: --algo NAME (have: dapo"),
        (["--algo", "rsippo", "--env", "search"], "no algorithm 'rsippo'; did you mean 'rsipo'?"),
        (["--algo", "rsipo", "--env", "serch"], "no environment 'serch'; did you mean 'search'?"),
        ([*GOOD, "--model", "tinny"], "no model 'tinny'; did you mean 'tiny'?"),
        ([*GOOD, "--trainer", "dpp"], "no trainer 'dpp'; did you mean 'ddp'?"),
        ([*GOOD, "--engine", "hff"], "no engine 'hff'; did you mean 'hf'?"),
        ([*GOOD, "--modle", "tiny"], "no flag --modle; did you mean --model?"),
        ([*GOOD, "--mod=tiny"], "no flag --mod=tiny; did you mean --model?"),
        ([*GOOD, "--zzzz"], "no flag --zzzz; --help shows all"),
        ([*GOOD, "--config"], "argument --config: expected one argument"),
        ([*GOOD, "--config", "nope.yaml"], "no config file nope.yaml"),
        ([*GOOD, "algo.trusst=false"], "no key 'algo.trusst'; did you mean 'algo.trust'?"),
        ([*GOOD, "env.questons=x"], "no key 'env.questons'; did you mean 'env.questions'?"),
        ([*GOOD, "rollout.group=many"], "rollout.group=many: Value 'many' of type 'str'"),
        ([*GOOD, "algo.noise=loud"], "algo.noise=loud: must be one of"),
        ([*GOOD, "trainer.updates=0"], "trainer.updates=0: must be at least 1 (command line)"),
        ([*GOOD, "rollout.group=5"], "rollout.group=5: RSIPO"),
        ([*GOOD, "rollout.group=2"], "even number of at least 4"),
        ([*GOOD, "updates"], "'updates' is not key=value"),
        ([*GOOD, "run.dir=."], ". exists; choose another run.dir"),
        ([*GOOD, "run.root=/proc/none"], "cannot write to /proc: "),
        ([*GOOD, "run.root=/dev/null"], "cannot write to /dev/null: Not a directory; choose"),
        ([*GOOD, "run.dir=/dev/null/run"], "choose another place with run.dir=FOLDER"),
        ([*GOOD, "optim.lr=nan"], "optim.lr=nan: must be above 0"),
        ([*GOOD, "algo.distill=-1"], "algo.distill=-1.0: must lie between 0 and 1e+09"),
        ([*GOOD, "algo.kl=1e30"], "algo.kl=1e+30: must lie between 0 and 1e+09"),
        ([*GOOD, "log.loggers=[tensorbord]"], "did you mean 'tensorboard'?"),
        ([*GOOD, "log.loggers=[no.such.Logger]"], "log.loggers=no.such.Logger: cannot be imported"),
        ([*GOOD, "--config", "."], ". cannot be read: "),
        ([*GOOD, "--config", "/dev/null/x"], "cannot be read: "),
        (["--resume", "nope"], "nope is not the folder of a run: it has no config.yaml"),
        (["--resume", "x", "--algo", "grpo", "--config", "y"], "leave out --algo, --config"),
    ],
)
def test_fit(error: Error, argv: list[str], says: str) -> None:
    line = error(*argv)
    assert line.startswith("rsipo-fit: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: RUN_OR_MODEL_DIR"),
        (["nope", "--env", "search"], "nope is neither the folder of a run (config.yaml) nor of a"),
        ([".", "--episodes", "many"], "argument --episodes: invalid int value: 'many'"),
        ([".", "--episodes", "0"], "--episodes 0: must be at least 1"),
        ([".", "--episode=1"], "no flag --episode=1; did you mean --episodes?"),
        ([".", "--samples", "0"], "--samples 0: must be at least 1"),
        ([".", "--per-type", "5", "--episodes", "9"], "not allowed with argument --per-type"),
    ],
)
def test_eval(error: Error, argv: list[str], says: str) -> None:
    line = error(*argv, main=eval_main)
    assert line.startswith("rsipo-eval: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"optim:\n\tlr: 1", "found character that cannot start any token in line 2"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "mine.yaml cannot be read: "),
        (b"\x00" * 99, "mine.yaml cannot be read: "),
        (b"just words", "no key 'just words'; --print-config shows all keys (mine.yaml)"),
        (b"a: &a [*a]", "mine.yaml"),
    ],
)
def test_a_config_file_that_is_none(error: Error, content: bytes, says: str) -> None:
    Path("mine.yaml").write_bytes(content)
    assert says in error(*GOOD, "--config", "mine.yaml")


def test_resume_of_a_run_without_a_checkpoint(error: Error) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("groups: {algo: grpo, env: search}")
    Path("run/run.json").write_text("{}")
    assert "no complete checkpoint in run/checkpoints" in error("--resume", "run")
    Path("run/config.yaml").write_text("groups: [")
    assert "run/config.yaml cannot be read" in error("--resume", "run")


def test_flags_and_keys_in_any_order_reach_the_run(build: FakeBuild) -> None:
    argv = ["seed=1", "--algo", "grpo", "trainer.updates=2", "--env=search", "seed=7"]
    assert fit_main(argv) == 0
    (call,) = build.calls
    assert call["config"].groups["algo"] == "grpo"
    assert (call["config"].seed, call["config"].trainer.updates) == (7, 2)
    assert call["resume"] is None
    assert call["command"] == ["rsipo-fit", *argv]


def test_print_config_runs_nothing(build: FakeBuild, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_main([*GOOD, "--print-config", "seed=5"]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines() if line.startswith("seed")] == [
        ["seed:", "5", "#", "command", "line"]
    ]
    Path("mine.yaml").write_text(text)
    assert fit_main(["--config", "mine.yaml"]) == 0
    assert [call["config"].seed for call in build.calls] == [5]


def test_list_names_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_main(["--list"]) == 0
    text = capsys.readouterr().out
    for name in ("--algo", "rsipo", "grpo", "--env", "search", "--model", "tiny", "--trainer"):
        assert name in text
    for line in text.splitlines():
        if line.startswith("  "):
            assert len(line.split()) > 2, f"say in one line what this is: {line}"


class TestAfterTheStart:
    def run_folder(self, config: RunConfig) -> RunFolder:
        folder = RunFolder.create(config, ["rsipo-fit"])
        (folder.path / "checkpoints").mkdir()
        (folder.path / "checkpoints" / "update-000003.ckpt").touch()
        return folder

    @pytest.fixture
    def folder(self, build: FakeBuild, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
        monkeypatch.setenv("RSIPO_RUN_DIR", "")
        assert fit_main([*GOOD, "run.dir=mine", "seed=4"]) == 0
        return self.run_folder(build.calls.pop()["config"])

    def test_a_dead_engine(
        self, build: FakeBuild, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def die() -> None:
            with folder.resumable():
                raise EngineError("the engine is dead")

        build.act = die
        assert fit_main(GOOD) == 75
        assert capsys.readouterr().err == (
            "rsipo-fit: error: the engine is dead; checkpoint: mine/checkpoints/update-000003.ckpt;"
            " go on with: rsipo-fit --resume mine\n"
        )

    def test_ctrl_c(
        self, build: FakeBuild, folder: RunFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def stop() -> None:
            with folder.resumable():
                raise KeyboardInterrupt

        build.act = stop
        assert fit_main(GOOD) == 130
        assert capsys.readouterr().err == (
            "rsipo-fit: stopped by Ctrl-C; checkpoint: mine/checkpoints/update-000003.ckpt;"
            " go on with: rsipo-fit --resume mine\n"
        )

    def test_an_unexpected_error_keeps_its_traceback(self, build: FakeBuild) -> None:
        build.act = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            fit_main(GOOD)

    def test_resume_takes_the_config_of_the_run(self, build: FakeBuild, folder: RunFolder) -> None:
        assert fit_main(["--resume", "mine", "trainer.updates=60"]) == 0
        (call,) = build.calls
        assert call["resume"] == "mine"
        assert call["config"].groups["algo"] == "rsipo"
        assert (call["config"].seed, call["config"].trainer.updates) == (4, 60)

    def test_eval_takes_the_config_of_the_run(self, build: FakeBuild, folder: RunFolder) -> None:
        assert eval_main(["mine", "--episodes", "9", "eval.temperature=0"]) == 0
        (call,) = build.calls
        assert call["path"] == Path("mine")
        assert (call["split"], call["episodes"]) == ("test", 9)
        assert (call["config"].seed, call["config"].eval.temperature) == (4, 0)

    @pytest.mark.parametrize(
        ("argv", "split"),
        [
            ([], "test"),
            (["env.questions=q.jsonl"], "all"),
            (["env.questions={a.jsonl: 1}"], "all"),
            (["env={questions: q.jsonl}"], "all"),
            (["env.questions=q.jsonl", "--split", "val"], "val"),
            (["env.questions=null"], "test"),
            (["env.eval_questions=q.jsonl"], "test"),
        ],
    )
    def test_eval_plays_all_of_the_questions_that_it_is_given(
        self, build: FakeBuild, folder: RunFolder, argv: list[str], split: str
    ) -> None:
        assert eval_main(["mine", *argv]) == 0
        assert build.calls[0]["split"] == split

    def test_eval_of_a_model_folder_needs_an_environment(
        self, build: FakeBuild, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("model").mkdir()
        Path("model/config.json").write_text("{}")
        assert eval_main(["model"]) == 2
        assert "choose an environment" in capsys.readouterr().err
        assert eval_main(["model", "--env", "search", "--split", "test"]) == 0
        assert build.calls[0]["split"] == "test"

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--samples", "3", "eval.temperature=0"], "--samples 3 are all the same at"),
            (["--published-model", "X"], "--published-model is given without --published CSV"),
            (["--published", "no.csv", "--published-model", "X"], "no.csv cannot be read"),
            (["--out", "x.txt"], "--out x.txt: must end in .json"),
            (["--out", "no/x.json"], "--out no/x.json: cannot write to the folder no"),
            (["--out", "mine/old.json"], "mine/old.json exists; choose another name"),
        ],
    )
    def test_eval_flags(
        self,
        build: FakeBuild,
        folder: RunFolder,
        argv: list[str],
        says: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder.path / "old.json").touch()
        assert eval_main(["mine", *argv]) == 2
        assert says in capsys.readouterr().err
        assert build.calls == []


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--list"], 0, ""),
        ([*GOOD, "rollout.gruop=8"], 2, "no key 'rollout.gruop'; did you mean 'rollout.group'?"),
        ([*GOOD, "--resume=nope"], 2, "leave out --algo, --env"),
    ],
)
def test_as_a_program(argv: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rsipo_lightning", *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert says in done.stderr
    assert done.stderr.count("\n") == (1 if code else 0)
    assert list(tmp_path.iterdir()) == []
