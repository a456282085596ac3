"""``log.loggers``: names, import paths, and what is said where one cannot be had."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger

from rsipo_lightning.callbacks import board
from rsipo_lightning.callbacks.board import Board
from rsipo_lightning.callbacks.loggers import check_loggers, make_loggers
from rsipo_lightning.composing import compose
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.run_folder import RunFolder

PATH = "lightning.pytorch.loggers.CSVLogger"


class Refuses(CSVLogger):
    """A service without a key."""

    def __init__(self, save_dir: str) -> None:
        raise RuntimeError("no key\nlong explanation")


def config(tmp_path: Path, *names: str) -> RunConfig:
    keys = [f"log.loggers=[{','.join(names)}]", f"run.root={tmp_path}"]
    return compose(algo="grpo", env="search", overrides=keys)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loggers of a new run, and of the same run gone on with at update 3."""

    def make(*names: str) -> tuple[Path, list[Logger], list[Logger]]:
        run = config(tmp_path, *names)
        folder = RunFolder.create(run, [])
        return folder.path, make_loggers(run, folder, 1), make_loggers(run, folder, 3)

    return make


def test_tensorboard_alone_is_the_default() -> None:
    assert compose(algo="grpo", env="search").log.loggers == ["tensorboard"]


def test_csv_is_lightnings_and_a_resume_deletes_nothing(start: Any) -> None:
    path, (first,), (again,) = start("csv")
    first.log_metrics({"a": 1.0}, step=1)
    first.log_metrics({"b": 2.0}, step=2)
    again.log_metrics({"a": 3.0}, step=3)

    def steps(name: str) -> list[str]:
        with (path / "csv" / name / "metrics.csv").open() as file:
            return [row["step"] for row in csv.DictReader(file)]

    assert (steps("from-000001"), steps("from-000003")) == (["1", "2"], ["3"])
    saved = yaml.safe_load((path / "csv" / "from-000001" / "hparams.yaml").read_text())
    assert saved["groups"]["algo"] == "grpo"


def test_any_logger_of_lightning_by_its_path(start: Any) -> None:
    path, made, _ = start("tensorboard", PATH)
    assert [type(logger) for logger in made] == [Board, CSVLogger]
    made[1].log_metrics({"a": 1.0}, step=1)
    made[1].save()
    (file,) = path.rglob("version_0/metrics.csv")
    assert "a" in file.read_text()


def test_text_and_layout_are_for_tensorboard_alone(start: Any) -> None:
    _, made, _ = start("csv", "tensorboard")
    trainer = cast(Any, SimpleNamespace(is_global_zero=True, loggers=made))
    assert len(list(board.writers(trainer))) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wandb", "log.loggers=wandb: the package is missing; pip install wandb"),
        ("no.such.Logger", "log.loggers=no.such.Logger: cannot be imported: No module named 'no'"),
        ("lightning.pytorch.loggers.NoLogger", "cannot be imported: module"),
        ("pathlib.Path", "log.loggers=pathlib.Path: not a lightning.pytorch.loggers.Logger"),
        ("lightning.pytorch.loggers.CometLogger", "takes no save_dir"),
        (".x", "log.loggers=.x: cannot be imported"),
    ],
)
def test_what_cannot_be_had(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    with pytest.raises(ConfigError) as caught:
        check_loggers(["csv", name])
    assert says in str(caught.value)


def test_a_service_that_refuses(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mine", cast(Any, SimpleNamespace(Refuses=Refuses)))
    check_loggers(["mine.Refuses"])
    with pytest.raises(ConfigError) as caught:
        start("mine.Refuses")
    assert str(caught.value) == "log.loggers=mine.Refuses: cannot start: no key"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[tensorbord]", "log.loggers=tensorbord: no such logger; did you mean 'tensorboard'?"),
        ("[csv,csv]", "log.loggers=csv: stands twice"),
        ("csv", "log.loggers=csv: "),
        ("[1]", "no such logger"),
    ],
)
def test_names(value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(algo="grpo", env="search", overrides=[f"log.loggers={value}"])
    assert says in str(caught.value)
    assert "(command line)" in str(caught.value)
