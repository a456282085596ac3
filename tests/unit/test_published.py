"""Published numbers stand beside ours only where the same set was run in full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from rsipo_lightning.callbacks.eval_result import SUCCESS, EvalResult, Sums, Tally
from rsipo_lightning.errors import ConfigError, DataError
from rsipo_lightning.published import COLUMNS, Published

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("RSIPO_DATA") or ROOT.parent / "shared" / "data").parent
FILE = SHARED / "spec" / "published_results.csv"
HEAD = "model,method,nq,triviaqa,popqa,hotpotqa,2wiki,musique,bamboogle,search_avg,source\n"
ROWS = """\
Big,Vanilla,25.2,50.8,29.5,29.0,29.0,10.4,63.7,33.9,Table 1
Small,Vanilla,24.6,48.1,31.0,26.3,25.3,7.2,59.7,31.7,Table 1
Small,GRPO,39.3,60.6,41.1,37.4,34.6,15.4,26.4,36.4,Table 2
Small,RSIPO,,,,,,,,45.3,seeds
"""
SIZES = {s.task_type: s.size for s in COLUMNS["search"].sets}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "published.csv"
    path.write_text(HEAD + ROWS)
    return path


def result(sizes: dict[str, int], frac: float = 0.25) -> EvalResult:
    types = {
        name: Tally(n, n, values={SUCCESS: Sums(frac * n, frac * n)}) for name, n in sizes.items()
    }
    return EvalResult("search", "all", 0.4, types, 1.0)


def shown(published: Published, found: EvalResult, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in published.tables(found, width):
        console.print(table)
    return console.export_text()


def test_the_sizes_are_those_of_the_papers() -> None:
    assert sum(SIZES.values()) == 51713


def test_a_set_in_full_beside_one_in_part(file: Path) -> None:
    published = Published.read(file, "Small", "search")
    found = result({"bamboogle": 125, "nq": 3609})
    rows = {row.name: row for row in published.rows(found)}
    assert rows["bamboogle"].published == {"Vanilla": 59.7, "GRPO": 26.4}
    assert rows["bamboogle"].ours == 25
    assert (rows["nq"].in_full, rows["nq"].published, rows["nq"].ours) == (False, {}, 25)
    assert (rows["popqa"].tasks, rows["popqa"].ours) == (0, None)
    assert len(rows) == 7  # no average

    text = shown(published, found)
    lines = text.splitlines()

    def cells(name: str) -> list[str]:
        return (
            next(line for line in lines if f" {name} " in line)
            .translate(str.maketrans("│┃", "  "))
            .split()
        )

    assert cells("set")[2:] == ["ours", "Vanilla", "GRPO"]
    assert cells("bamboogle") == ["bamboogle", "125", "of", "125", "25.0", "59.7", "26.4"]
    assert cells("nq") == ["nq", "3609", "of", "3610", "25.0", "-", "-"]
    assert cells("popqa") == ["popqa", "0", "of", "14267", "-", "-", "-"]
    flat = " ".join(text.split())
    assert "right of it what is published of Small" in flat
    assert "Sets that were not run in full have no published number here." in flat
    assert "RSIPO" not in text  # it has an average only
    assert "Table 2: GRPO" in text
    assert "39.3" not in text


def test_the_average_stands_where_all_sets_were_run_in_full(file: Path) -> None:
    published = Published.read(file, "Small", "search")
    found = result(SIZES | {"other": 10}, 0.5)
    average = published.rows(found)[-1]
    assert average.name == "macro average"
    assert average.published == {"Vanilla": 31.7, "GRPO": 36.4, "RSIPO": 45.3}
    assert (average.ours, average.size) == (50, 51713)
    assert len(published.rows(result(SIZES | {"musique": 2416}))) == 7
    data = published.to_json(found)
    assert data["rows"][0]["published"] == {"Vanilla": 24.6, "GRPO": 39.3}
    assert data["sources"]["RSIPO"] == "seeds"


def test_nothing_in_full_shows_nothing_published(file: Path) -> None:
    published = Published.read(file, "Small", "search")
    text = shown(published, result({"bamboogle": 124}))
    assert "No set was run in full" in text
    assert "Vanilla" not in text


def test_an_average_of_another_kind_is_left_out(file: Path) -> None:
    file.write_text(HEAD + ROWS + "Small,Pooled,39.3,60.6,41.1,37.4,34.6,15.4,26.4,44.0,Table 3\n")
    published = Published.read(file, "Small", "search")
    rows = published.rows(result(SIZES))
    assert "Pooled" not in rows[-1].published
    assert rows[0].published["Pooled"] == 39.3
    assert "Stated average is not that of its sets, left out: Pooled" in shown(
        published, result(SIZES)
    )


def test_broken_episodes_make_a_set_incomplete(file: Path) -> None:
    found = result({})
    found.types["bamboogle"] = Tally(124, 124, broken=1, values={SUCCESS: Sums(3, 3)})
    row = Published.read(file, "Small", "search").rows(found)[-1]
    assert (row.name, row.in_full, row.published) == ("bamboogle", False, {})


def test_narrow_terminals_get_several_tables(file: Path) -> None:
    published = Published.read(file, "Small", "search")
    text = shown(published, result(SIZES), width=60)
    assert text.count("macro average") == 2
    numbers = {number for method in published.methods for number in method.values.values()}
    assert all(f"{number:.1f}" in text for number in numbers)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (None, "--published needs --published-model NAME \\(have: Big, Small\\)"),
        ("Smal", "--published-model Smal: .*published.csv has Big, Small"),
    ],
)
def test_models(file: Path, model: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Published.read(file, model, "search")


def test_files_that_cannot_be_used(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        Published.read(tmp_path / "none.csv", "Small", "search")
    file.write_text(HEAD.replace("nq,", "").replace("method,", "name,"))
    with pytest.raises(DataError, match="no column method, nq"):
        Published.read(file, "Small", "search")
    for bad in ("nan", "inf", "1e999"):
        file.write_text(HEAD + ROWS.replace("24.6", bad))
        with pytest.raises(DataError, match=rf"published\.csv:3: nq={bad} is not a number"):
            Published.read(file, "Small", "search")
    file.write_text(HEAD + ROWS + "Small,GRPO,1,,,,,,,,\n")
    with pytest.raises(DataError, match=r"published\.csv:6: Small, GRPO is also on line 4"):
        Published.read(file, "Small", "search")
    file.write_text(HEAD)
    with pytest.raises(DataError, match=r"published\.csv: holds no rows"):
        Published.read(file, "Small", "search")
    file.write_text(HEAD + ROWS.replace("24.6", "24.6%"))
    with pytest.raises(DataError, match=r"published\.csv:3: nq=24.6% is not a number"):
        Published.read(file, "Small", "search")


def test_tasks_that_are_no_published_set(file: Path) -> None:
    with pytest.raises(ConfigError, match="no published sets are known for shop \\(have: search"):
        Published.read(file, "Small", "shop")
    published = Published.read(file, "Small", "search")
    published.check({"bamboogle", "mine"})
    with pytest.raises(ConfigError, match="bamboogle; the tasks here are bridge2, single"):
        published.check({"single", "bridge2"})


@pytest.mark.skipif(not FILE.is_file(), reason=f"no {FILE} (RSIPO_DATA)")
def test_the_real_file() -> None:
    published = Published.read(FILE, "Qwen2.5-3B", "search")
    average = published.rows(result(SIZES))[-1].published
    assert (average["GRPO"], average["RSIPO"]) == (36.4, 45.3)
    assert "ADRS" not in average  # 45.0 where its seven numbers give 44.1
    for width in (80, 160):
        text = shown(published, result(SIZES), width)
        assert "…" not in text
        assert "left out: ADRS" in text


def test_a_file_as_spreadsheets_write_it(file: Path) -> None:
    """With a byte order mark."""
    file.write_text(HEAD + ROWS, encoding="utf-8-sig")
    assert len(Published.read(file, "Small", "search").methods) == 3


GAMES = {s.task_type: s.size for s in COLUMNS["alfworld"].sets}
DRAWN = dict(zip(GAMES, (30, 10, 32, 21, 20, 15), strict=True))


class TestAlfworld:
    """Most papers played 128 draws of valid_seen with repeats, so they are not beside its 140."""

    HEAD = "model,method,pick,look,clean,heat,cool,pick2,alf_avg,alf_avg_kind,source\n"
    ROWS = """\
Small,GRPO,91.2,62.5,96.2,61.9,65.0,47.4,75.0,micro128,Table 1
Small,OPID,92.7,100.0,88.9,70.0,84.2,70.0,84.3,macro6,Table 2
Small,Odd,90.0,90.0,90.0,90.0,90.0,90.0,91.0,macro6,Table 2
Small,StepOPSD,97.1,66.7,87.0,79.1,78.9,95.0,83.6,unclear,Table 3
Small,RSIPO,,,,,,,95.7,134/140?,seeds
"""

    @pytest.fixture
    def published(self, tmp_path: Path) -> Published:
        path = tmp_path / "published.csv"
        path.write_text(self.HEAD + self.ROWS)
        return Published.read(path, "Small", "alfworld")

    def look(self, split: str, sizes: dict[str, int]) -> EvalResult:
        """Success in half of the first type, nowhere else."""
        types = {n: Tally(k, k, values={SUCCESS: Sums()}) for n, k in sizes.items()}
        first = sizes["pick_and_place_simple"]
        won = Sums(first / 2, first / 2)
        types["pick_and_place_simple"] = Tally(first, first, values={SUCCESS: won})
        return EvalResult("alfworld", split, 0.4, types, 1.0)

    @pytest.mark.parametrize("split", ["valid_seen", "test"])
    def test_each_game_once(self, published: Published, split: str) -> None:
        assert sum(GAMES.values()) == 140
        found = self.look(split, GAMES)
        *sets, sample, macro = published.rows(found)
        assert all(row.published == {} for row in sets)
        assert (sample.name, sample.size, sample.ours) == ("sample average", 140, 12.5)
        assert sample.published == {"RSIPO": 95.7}
        assert (macro.name, macro.ours) == ("macro average", pytest.approx(50 / 6))
        assert macro.published == {}
        flat = " ".join(shown(published, found).split())
        assert "134/140?: RSIPO" in flat
        assert "Not measured on these tasks, left out: GRPO, OPID, Odd, StepOPSD" in flat

    def test_draws(self, published: Published) -> None:
        assert sum(DRAWN.values()) == 128
        found = self.look("legacy128", DRAWN)
        *sets, sample, macro = published.rows(found)
        assert sets[0].published == {"GRPO": 91.2, "OPID": 92.7, "Odd": 90.0}
        assert sample.ours == pytest.approx(100 * 15 / 128)
        assert sample.published == {"GRPO": 75.0}
        assert macro.published == {"OPID": 84.3}
        flat = " ".join(shown(published, found).split())
        assert "micro128: GRPO" in flat
        assert "macro6: OPID, Odd" in flat
        assert "Not measured on these tasks, left out: StepOPSD, RSIPO" in flat
        assert "legacy128: tasks are drawn as theirs were, but are not the same." in flat
        assert "Stated average is not that of its sets, left out: Odd" in flat
        assert published.to_json(found)["kinds"]["OPID"] == "macro6"

    def test_none_of_the_same_tasks(self, tmp_path: Path) -> None:
        path = tmp_path / "published.csv"
        path.write_text(self.HEAD + self.ROWS.replace("RSIPO,,,,,,,95.7,134/140?", "X,,,,,,,9,?"))
        published = Published.read(path, "Small", "alfworld")
        text = shown(published, self.look("valid_seen", GAMES))
        assert "None is of these tasks: no published number is shown." in text

    @pytest.mark.parametrize(
        ("split", "less"), [("legacy128", DRAWN), ("valid_seen", GAMES), ("valid_unseen", DRAWN)]
    )
    def test_in_part(self, published: Published, split: str, less: dict[str, int]) -> None:
        found = self.look(split, less | {"pick_heat_then_place_in_recep": 15})
        rows = published.rows(found)
        assert len(rows) == 6
        assert all(row.published == {} for row in rows)

    def test_other_games_of_which_one_type_has_as_many(self, tmp_path: Path) -> None:
        """The 144 generated games have 24 of pick_two, as the release has."""
        path = tmp_path / "published.csv"
        path.write_text(self.HEAD + self.ROWS.replace("75.0,micro128", "75.0,105/140"))
        published = Published.read(path, "Small", "alfworld")
        assert published.rows(self.look("valid_seen", GAMES))[5].published == {"GRPO": 47.4}
        rows = published.rows(self.look("valid_seen", dict.fromkeys(GAMES, 24)))
        assert rows[5].tasks == GAMES["pick_two_obj_and_place"]
        assert not any(row.published for row in rows)

    @pytest.mark.skipif(not FILE.is_file(), reason=f"no {FILE} (RSIPO_DATA)")
    def test_the_real_file(self) -> None:
        published = Published.read(FILE, "Qwen2.5-3B", "alfworld")
        *_, sample, macro = published.rows(self.look("legacy128", DRAWN))
        assert len(sample.published) == 16
        assert sorted(macro.published) == [
            "OPID",
            "SEED",
            "SEED w/o SFT",
            "SEED w/o self-evolving OPD",
        ]
        assert "…" not in shown(published, self.look("legacy128", DRAWN), 100)
