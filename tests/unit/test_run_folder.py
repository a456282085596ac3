"""The run folder: what it holds, and that it is never somebody else's."""

import csv
import errno
import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rsipo_lightning import run_folder
from rsipo_lightning.composing import plain
from rsipo_lightning.config import RunConfig, RunSection
from rsipo_lightning.errors import CheckpointError, ConfigError, DataError, EngineError
from rsipo_lightning.metrics_csv import MetricsCsv
from rsipo_lightning.run_folder import (
    RunFolder,
    check_writable,
    git_state,
    versions,
)

COMMAND = ["rsipo-fit", "--algo", "rsipo", "env.questions=a b.jsonl"]


def config(root: Path, fixed: Path | None = None, seed: int = 3) -> RunConfig:
    run = RunSection(root=str(root), dir=str(fixed) if fixed else None)
    return RunConfig(groups={"algo": "rsipo", "env": "search"}, seed=seed, run=run)


class TestCreate:
    def test_the_name_tells_environment_algorithm_and_seed(self, tmp_path: Path) -> None:
        path = RunFolder.create(config(tmp_path), COMMAND).path
        assert path.parent == tmp_path / "search" / "rsipo"
        assert path.name.endswith("-s3")

    def test_runs_that_start_at_once_get_folders_of_their_own(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            folders = list(
                pool.map(lambda _: RunFolder.create(config(tmp_path), COMMAND), range(16))
            )
        assert len({folder.path for folder in folders}) == 16
        assert all(folder.record()["seed"] == 3 for folder in folders)

    def test_what_is_recorded(self, tmp_path: Path) -> None:
        data = {"questions": {"path": "a b.jsonl", "sha256": "ab"}, "counts": (1, 2)}
        record = RunFolder.create(config(tmp_path), COMMAND, data).record()
        assert shlex.split(record["command"]) == COMMAND
        assert record["groups"] == {"algo": "rsipo", "env": "search"}
        assert record["data"] == {**data, "counts": [1, 2]}
        assert record["versions"]["torch"].startswith("2.")
        assert record["git"] == git_state()
        assert record["folder"] == os.getcwd()

    def test_ctrl_c_in_between_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pressed(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(run_folder, "origin", pressed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.create(config(tmp_path / "runs"), COMMAND)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("fixed", [True, False])
    def test_a_name_that_is_too_long(self, tmp_path: Path, fixed: bool) -> None:
        path = tmp_path / "new" / ("x" * 300)
        with pytest.raises(ConfigError, match=r"cannot make .*: File name too long"):
            RunFolder.create(config(path, path if fixed else None), COMMAND)
        assert list(tmp_path.iterdir()) == []

    def test_a_fixed_folder_must_not_exist(self, tmp_path: Path) -> None:
        fixed = tmp_path / "a" / "mine"
        assert RunFolder.create(config(tmp_path, fixed), COMMAND).path == fixed
        with pytest.raises(ConfigError, match=r"mine exists; choose another run\.dir"):
            RunFolder.create(config(tmp_path, fixed), COMMAND)

    def test_the_saved_config_makes_a_new_folder(self, tmp_path: Path) -> None:
        folder = RunFolder.create(config(tmp_path, tmp_path / "mine"), COMMAND)
        text = folder.config_file.read_text()
        assert "  dir: null\n" in text
        assert "seed: 3\n" in text


class TestRecord:
    def test_the_costs_of_a_resumed_run_add_up(self, tmp_path: Path) -> None:
        RunFolder.create(config(tmp_path, tmp_path / "run"), COMMAND).finish({"a": 1}, 10, 8)
        folder = RunFolder.open(tmp_path / "run")
        folder.resumed(config(tmp_path, seed=4), ["rsipo-fit", "--resume", "run"])
        folder.finish({"a": (2,)}, 1.5, 1)
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (record["wall_s"], record["cpu_s"]) == (11.5, 9)
        assert record["result"] == {"a": [2]}
        assert [again["command"] for again in record["resumed"]] == ["rsipo-fit --resume run"]
        assert record["command"].startswith("rsipo-fit --algo rsipo")
        assert "seed: 4\n" in folder.config_file.read_text()

    def test_no_half_written_file_is_left(self, tmp_path: Path) -> None:
        folder = RunFolder.create(config(tmp_path), COMMAND)
        folder.finish({}, 1, 1)
        assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "run.json"]

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"not the folder of a run: it has no config\.yaml"):
            RunFolder.open(tmp_path)
        (tmp_path / "config.yaml").touch()
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(DataError, match=r"run\.json cannot be read"):
            RunFolder.open(tmp_path).record()

    def test_a_record_that_cannot_be_written(self, tmp_path: Path) -> None:
        folder = RunFolder.create(config(tmp_path), COMMAND)
        (folder.path / "run.json.part").mkdir()
        with pytest.raises(CheckpointError, match=r"cannot write .*run\.json"):
            folder.finish({}, 1, 1)


class TestResumable:
    @pytest.mark.parametrize("error", [EngineError("dead"), KeyboardInterrupt()])
    def test_an_error_says_how_to_go_on(self, tmp_path: Path, error: BaseException) -> None:
        folder = RunFolder(tmp_path / "a run")
        for name in ("update-000000.ckpt", "update-000010.ckpt", "update-000011.ckpt.part"):
            (folder.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (folder.path / "checkpoints" / name).touch()
        with pytest.raises(type(error)) as caught, folder.resumable():
            raise error
        (note,) = caught.value.__notes__
        assert f"checkpoint: {folder.path}/checkpoints/update-000010.ckpt; " in note
        assert note.endswith(f"rsipo-fit --resume '{folder.path}'")

    def test_without_a_checkpoint_there_is_nothing_to_go_on_from(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError) as caught, RunFolder(tmp_path).resumable():
            raise EngineError("dead")
        assert not hasattr(caught.value, "__notes__")

    def test_a_new_run_that_has_not_begun_leaves_nothing(self, tmp_path: Path) -> None:
        """But what others made stays, and so does a run whose checkpoints somebody removed."""

        def fails(folder: RunFolder, error: Exception) -> None:
            with folder.resumable():
                raise error

        root = tmp_path / "a" / "b"
        with pytest.raises(EngineError):
            fails(RunFolder.create(config(root), COMMAND), EngineError("dead"))
        assert list(tmp_path.iterdir()) == []
        kept = RunFolder.create(config(root), COMMAND)
        (kept.path / "metrics.csv").touch()
        for folder in (RunFolder.create(config(root), COMMAND), kept):
            with pytest.raises(CheckpointError, match=r"cannot write to .*: No space left on dev"):
                fails(folder, OSError(errno.ENOSPC, "No space left on device"))
        assert list((root / "search" / "rsipo").iterdir()) == [kept.path]

    def test_other_errors_of_the_system_keep_their_traceback(self, tmp_path: Path) -> None:
        with pytest.raises(ConnectionError), RunFolder(tmp_path).resumable():
            raise ConnectionError("not a disk")


class TestCheckWritable:
    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        check_writable(config(tmp_path / "a" / "b"))
        check_writable(config(tmp_path, tmp_path / "c" / "d"))
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot write to .*file: .*run\.root=FOLDER"):
            check_writable(config(tmp_path / "file" / "runs"))
        with pytest.raises(ConfigError, match=r"run\.dir=FOLDER"):
            check_writable(config(tmp_path, tmp_path / "file" / "run"))

    def test_a_fixed_folder_that_exists(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="exists; choose another"):
            check_writable(config(tmp_path, tmp_path))


class TestMetricsCsv:
    def read(self, path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def test_columns_grow(self, tmp_path: Path) -> None:
        table = MetricsCsv(tmp_path / "metrics.csv")
        table.write(1, {"a": 0.1})
        table.write(2, {"a": 1e-7, "b": 2.0})
        table.write(3, {"b": 3.0})
        assert self.read(table.path) == [
            {"update": "1", "a": "0.1", "b": ""},
            {"update": "2", "a": "1e-07", "b": "2.0"},
            {"update": "3", "a": "", "b": "3.0"},
        ]

    def test_a_resumed_run_replaces_the_rows_that_it_makes_again(self, tmp_path: Path) -> None:
        table = MetricsCsv(tmp_path / "metrics.csv")
        for update in (1, 2, 3):
            table.write(update, {"a": update, "b": 0.5})
        again = MetricsCsv(table.path)
        again.truncate_after(2)
        assert [row["update"] for row in self.read(table.path)] == ["1", "2"]
        again.write(3, {"a": 30.0, "c": 1.0})
        assert self.read(table.path) == [
            {"update": "1", "a": "1", "b": "0.5", "c": ""},
            {"update": "2", "a": "2", "b": "0.5", "c": ""},
            {"update": "3", "a": "30.0", "b": "", "c": "1.0"},
        ]


def test_versions_name_what_is_installed() -> None:
    assert {"torch", "lightning", "omegaconf"} <= set(versions())
    assert "vllm" not in versions() or versions()["vllm"]


def test_plain_knows_dataclasses_and_tuples(tmp_path: Path) -> None:
    assert plain(config(tmp_path))["optim"]["betas"] == [0.9, 0.999]
