"""``rsipo-compare``: the same tasks, evaluation and budget for every method, over seeds.

>>> from pathlib import Path
>>> from rsipo_lightning.compare import Arm, Setup, compare
>>> setup = Setup({"env": "search"}, ("trainer.updates=30",), Path("runs/compare/search"))
>>> compare(setup, [Arm("grpo", "grpo"), Arm("rsipo", "rsipo")], seeds=range(5))

plan (which runs) -> processes (run them) -> collect (read them) -> summary (statistics)
-> report (compare.json, compare.md) and figures (PNG).
"""

from rsipo_lightning.compare.main import compare
from rsipo_lightning.compare.plan import Arm, Setup

__all__ = ["Arm", "Setup", "compare"]
