"""What is shown while runs are going."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from rsipo_lightning.compare.board import Board
from rsipo_lightning.compare.plan import Arm, Setup, State, plan


def shown(board: Board) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(board.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_per_arm_and_a_column_per_seed(tmp_path: Path) -> None:
    setup = Setup({"env": "search"}, ("trainer.updates=30",), tmp_path)
    one, other, third = plan(setup, [Arm("grpo", "grpo")], [0, 1, 7], None)[Arm("grpo", "grpo")]
    out = io.StringIO()
    board = Board({one: State.NEW, other: State.DONE, third: State.NEW}, Console(file=out))
    assert [text in shown(board) for text in ("seed 7", "waiting", "done")] == [True] * 3
    with board:
        board.started(one)
        assert "starts" in shown(board)
        one.folder.mkdir(parents=True)
        (one.folder / "metrics.csv").write_text("update,rollout/success_frac\n1,0.2\n2,0.53125\n")
        assert "2/30 0.53" in shown(board)
        board.started(third)
        board.failed(third, "error: [no] luck")
        assert "failed" in shown(board)
        board.finished(one)
    assert shown(board).count("done") == 2
    assert out.getvalue().splitlines() == [
        "grpo seed 0: started",
        "grpo seed 7: started",
        f"grpo seed 7: failed: error: [no] luck ({third.log})",
        "grpo seed 0: done",
    ]
