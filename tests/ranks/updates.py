"""One rank: updates from recorded trajectories, by the real trainer. Started by test_updates.py.

updates.py STRATEGY OUT CASES [cpu|cuda]
"""

import copy
import json
import os
import sys
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor

from rsipo_lightning import build, module
from rsipo_lightning.algorithms.base import Algorithm
from rsipo_lightning.build import quiet
from rsipo_lightning.config import OptimSection, RunConfig, TrainerSection
from rsipo_lightning.frozen import AdapterOff
from rsipo_lightning.metrics import gather, rank_of_ranks
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy
from rsipo_lightning.sharding import Shards, acting_weights, whole
from rsipo_lightning.strategy import Zero3Strategy, connect
from rsipo_lightning.testing import adapted_policy, make_algorithm, toy_world
from rsipo_lightning.types import Iteration, MicroBatch

LR = 64.0  # large, so that the rounding of the weights hides nothing of the update
WORLD = toy_world()
KIND = sys.argv[4] if len(sys.argv) > 4 else "cpu"
DEVICES = int(os.environ["LOCAL_WORLD_SIZE"])


class Sgd(PolicyModule):
    """A step is the gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.trained(), lr=LR)


class Manual(Sgd):
    """The fault: several backward passes in one training step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def train_dataloader(self) -> Any:
        return [0]

    def training_step(self, micro: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        assert not isinstance(micro, MicroBatch)
        optimizer: Any = self.optimizers()
        for part in self._parts:
            loss = self.objective(part) * self.trainer.world_size
            self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Recorded(L.Callback):
    def __init__(self, it: Iteration) -> None:
        self.it = it

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.iteration = self.it


def own(it: Iteration, alone: bool) -> Iteration:
    """This rank's tasks; ``alone``: the first rank has all."""
    rank, ranks = rank_of_ranks()
    if alone:
        it.groups = [] if rank else it.groups
    else:
        it.groups = it.groups[rank::ranks]
    it.tasks = [group.task for group in it.groups]
    mine = {task.id for task in it.tasks}
    it.skills = [s for s in it.skills if s.task.id in mine]
    it.replays = [r for r in it.replays if r.skill.task.id in mine]
    return it


def update(strategy: str, case: dict[str, Any]) -> dict[str, Any]:
    """The weights' change by one update, divided by the learning rate, and what was measured."""
    algorithm: Algorithm[Any] = make_algorithm(case["algo"], WORLD.codec, **case["keys"])
    fault, micro = case.get("fault"), case["micro"]
    trainer = TrainerSection(strategy=strategy, devices=DEVICES, micro_batches=micro)
    optim = OptimSection(lr=LR, weight_decay=0.0, clip=case.get("clip", 0.0))
    config = RunConfig(trainer=trainer, optim=optim)
    it = own(WORLD.iteration(algorithm), case.get("alone", False))
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    config.model.dtype = str(dtype).removeprefix("torch.")
    assert WORLD.reference
    models = [copy.deepcopy(p.model).to(dtype) for p in (WORLD.policy, WORLD.reference)]
    if lora := case.get("lora"):
        models[0] = adapted_policy(Policy(models[0]), lora).model
    if strategy == "zero3":
        models = [Shards(config, KIND).load(lambda model=model: model) for model in models]
    policy = Policy(models[0], case.get("recompute", False))
    shards = Shards(config, KIND)
    reference = AdapterOff(policy) if lora else Policy(models[1]).requires_grad_(False)
    if strategy == "zero3" and not lora:
        shards.frozen(reference)
    kind = Manual if fault == "manual" else Sgd
    m = kind(policy, algorithm, config, None, reference)  # type: ignore[arg-type]
    before, base = weights(policy), frozen_weights(policy)
    fitted = L.Trainer(
        accelerator=KIND,
        devices=DEVICES,
        strategy=Zero3Strategy(shards.config) if strategy == "zero3" else strategy,
        max_epochs=1,
        accumulate_grad_batches=1 if fault == "manual" else micro,
        gradient_clip_val=None if fault == "manual" else config.optim.clip or None,
        callbacks=[Recorded(it)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    once = mock.patch.object(module, "loss_scale", lambda _, micro, ranks: micro * ranks)
    if fault == "once":
        with once:
            fitted.fit(m)
    else:
        fitted.fit(m)
    trust = {task: x for part in gather(dict(it.trust)) for task, x in part.items()}
    change = (before - weights(policy)).cpu() / LR
    assert torch.equal(base, frozen_weights(policy))
    acting = {n: x.detach().to("cpu", copy=True) for n, x in acting_weights(policy.model, 20_000)}
    norm = it.metrics.reduce().get("optim/grad_norm")
    return {"update": change, "norm": norm, "trust": trust, "acting": acting}


def weights(policy: Policy) -> Tensor:
    return flat(policy, trained=True)


def frozen_weights(policy: Policy) -> Tensor:
    return flat(policy, trained=False)


def flat(policy: Policy, trained: bool) -> Tensor:
    """All weights that are trained, or all others, in a row."""
    units = [(n, (p,)) for n, p in policy.model.named_parameters() if p.requires_grad == trained]
    parts = [p.detach().flatten().float() for _, (p,) in whole(units, 20_000)]
    return torch.cat(parts) if parts else torch.empty(0)


def main(strategy: str, out: str, cases: str) -> None:
    quiet()
    torch.set_num_threads(1)
    trainer = TrainerSection(strategy=strategy, devices=DEVICES)
    connect(RunConfig(trainer=trainer), KIND)
    done = {name: update(strategy, case) for name, case in json.loads(cases).items()}
    if os.environ["RANK"] == "0":
        torch.save(done, out)
    build.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:4])
