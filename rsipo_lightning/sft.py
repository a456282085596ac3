"""Stage 1 of the tiny policy: imitation of demonstrations, through the trainer that RL uses.

    python -m rsipo_lightning.sft [--out DIR] [--updates N] [--seed S]        (make tiny-policy)

The module is ``PolicyModule`` with one stream, ``imitate``; an update is one batch of rows of
similar length out of the mixture. At the end it prints how often the policy succeeds without a
skill and with each kind, and what share of the skills it writes can be parsed.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from rsipo_lightning.algorithms.base import Algorithm, AlgorithmConfig, Stream, Sums
from rsipo_lightning.algorithms.losses import nll
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import OptimSection, RunConfig, TrainerSection
from rsipo_lightning.demonstrations import Demonstrations, Row
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.environments import experts
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import TINY, Policy
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.skills import analysis_messages, read_skill
from rsipo_lightning.tiny import build_tokenizer, new_model
from rsipo_lightning.types import Credit, Iteration, Prompt, Role, Sample, Skill, Task

ROWS = 16  # of a batch: with 32 it learned less from as many tokens
POOL = 32  # batches that are made together, so that rows of similar length meet


class Batches:
    """Batches of rows by update."""

    def __init__(self, demonstrations: Demonstrations) -> None:
        self.demonstrations = demonstrations
        self._pool: tuple[int, list[list[Row]]] = -1, []

    def batch(self, update: int) -> list[Row]:
        """A function of the update alone; a pool is made when one of its batches is asked for."""
        number, offset = divmod(update, POOL)
        if self._pool[0] != number:
            self._pool = number, self._make(number)
        return self._pool[1][offset]

    def _make(self, number: int) -> list[list[Row]]:
        rows = [self.demonstrations.row("mixed", number, i) for i in range(ROWS * POOL)]
        rows.sort(key=lambda row: len(row.ids))
        batches = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
        keyed_random("pool", self.demonstrations.seed, number).shuffle(batches)
        return batches


class Imitate(Algorithm[AlgorithmConfig]):
    """Negative log-likelihood of rows, weighted by token."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(AlgorithmConfig(), 0)
        self.batches = batches

    @property
    def streams(self) -> dict[str, Stream]:
        return {"imitate": Stream(nll)}

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        return [sample(row) for row in self.batches.batch(it.update)]


def sample(row: Row) -> Sample:
    """A training row; the first token is never trained."""
    weights = torch.tensor(row.weights)
    mask = weights > 0
    mask[0] = False
    n = int(mask.sum())
    return Sample(
        ids=torch.tensor(row.ids),
        mask=mask,
        turn=torch.zeros(n, dtype=torch.long),
        engine_logprobs=torch.zeros(n),
        credits={"imitate": Credit(weights[mask], torch.ones(n))},
    )


class Updates(L.Callback):
    """Opens and closes the iterations of a run that plays no episodes, and shows how it goes."""

    def __init__(self, console: Console, every: int = 100) -> None:
        self.console, self.every = console, every
        self._loss = Metrics()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        pl_module.iteration = Iteration(pl_module.version, [], Metrics())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        pl_module.close_update()
        pl_module.version += 1
        self._loss.mean("loss", pl_module.iteration.metrics.reduce()["loss/imitate"])
        if pl_module.version % self.every == 0:
            line = f"update {pl_module.version}/{trainer.max_epochs}"
            loss = self._loss.reduce()["loss"]
            self.console.print(f"{line}  loss {loss:.3f}  {time.process_time():.0f} CPU s")
            self._loss = Metrics()


def train(updates: int, seed: int, console: Console) -> tuple[Policy, Codec]:
    """A tiny policy from nothing."""
    torch.set_num_threads(1)
    codec = Codec(build_tokenizer())
    policy = Policy(new_model(codec.tokenizer, seed))
    config = RunConfig(
        optim=OptimSection(
            lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, schedule="linear", warmup=50
        ),
        trainer=TrainerSection(updates=updates, micro_batches=1),
    )
    player = Player(_suite(), HFEngine(policy, codec.tokenizer), codec)
    module = PolicyModule(policy, Imitate(Batches(Demonstrations(codec, seed))), config, player)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=updates,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[Updates(console)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return policy.eval(), codec


def _suite() -> SearchSuite:
    return SearchSuite(SearchConfig(prompt="compact", topk=1), 0)


def report(policy: Policy, codec: Codec, per_type: int, split: str = "val") -> Table:
    """Success at T = 1 by task type without a skill and with scripted and own skills."""
    suite, engine = _suite(), HFEngine(policy, codec.tokenizer)
    player = Player(suite, engine, codec)
    how = Sampling(0, 1.0, 24, 4096, 128)
    tasks = [
        task
        for kind in suite.types
        for task in [t for t in suite.tasks(split) if t.type == kind][:per_type]
    ]
    table = Table(title=f"success (%) on {len(tasks)} {split} tasks at T = 1")
    for name in ("skill in the prompt", "all", *suite.types, "valid actions", "note"):
        table.add_column(name)

    def look(name: str, shown: Sequence[tuple[Task, str]], note: str = "") -> list[Skill]:
        jobs = [Job(t, Role.EVAL, 0, 0, Skill(t, text, "") if text else None) for t, text in shown]
        played = player.play(jobs, how)
        cells = [_share([t.success for t in played])]
        cells += [_share([t.success for t in played if t.task.type == k]) for k in suite.types]
        valid = _share([turn.valid for t in played for turn in t.turns])
        table.add_row(name, *cells, valid, note)
        prompts = [
            Prompt(codec.chat(analysis_messages(t, "compact")), 96, 1.0, i, codec.stop_ids)
            for i, t in enumerate(played)
        ]
        texts = [read_skill(c.text) for c in engine.generate(prompts)] if name == "none" else []
        return [
            Skill(t.task, text, "", bad or suite.check_skill(t, text))
            for t, (text, bad) in zip(played, texts, strict=False)
        ]

    written = look("none", [(task, "") for task in tasks])
    for kind in experts.KINDS:
        rng = random.Random(kind)
        look(kind, [(t, rng.choice(experts.skills(t.type, kind)).text) for t in tasks])
    good = [(s.task, s.text) for s in written if s.valid]
    look("own", good, f"{_share([s.valid for s in written])} of the written skills are valid")
    return table


def _share(hits: Sequence[bool]) -> str:
    return f"{100 * sum(hits) / len(hits):.1f}" if hits else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the tiny policy and write it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(prog="python -m rsipo_lightning.sft", description=__doc__)
    parser.add_argument("--out", type=Path, default=TINY, help=f"folder (default: {TINY})")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=100, help="of each type in the report")
    args = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console = Console(width=140)
    policy, codec = train(args.updates, args.seed, console)
    policy.model.save_pretrained(args.out)
    codec.tokenizer.save_pretrained(args.out)
    console.print(report(policy, codec, args.tasks))
    console.print(f"{args.out}: {time.process_time():.0f} CPU s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
