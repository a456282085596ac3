"""PolicyModule hosts the policy and turns an Iteration into one update, for any algorithm.

One Lightning epoch is one iteration and one training_step is one micro-batch, under automatic
optimization: manual optimization drops gradients under DeepSpeed without a word (docs/design.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rsipo_lightning import keys
from rsipo_lightning.algorithms.base import Algorithm, active
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import DivergedError, EngineError
from rsipo_lightning.frozen import follow, frozen, restore, state_of
from rsipo_lightning.policy import Policy
from rsipo_lightning.reduce import sum_over_ranks
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.sharding import sharded, share
from rsipo_lightning.strategy import Zero3Strategy, loss_scale
from rsipo_lightning.tokens import (
    SAME,
    TokenBatch,
    collate,
    importance,
    null_sample,
    pad,
    split,
)
from rsipo_lightning.types import (
    Iteration,
    MicroBatch,
    Role,
    RolloutGroup,
    Sample,
    Task,
    WrittenSkill,
)


class PolicyModule(L.LightningModule):
    """The policy under training; it offers ``play`` to callbacks."""

    iteration: Iteration  # filled by the callbacks before on_train_epoch_start of this module

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm[Any],
        config: RunConfig,
        player: Player,
        reference: nn.Module | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        """``reference`` and ``teacher`` are frozen copies; the latter is made here if the algorithm
        needs one and none is given.
        """
        super().__init__()
        self.policy = policy
        self.algorithm = algorithm
        self.run_config = config
        self.player = player
        self.streams = active(algorithm.streams)
        self.version = 0  # iterations trained
        self._reference = (
            [reference] if reference else []
        )  # in a list: frozen, and not part of any checkpoint
        self._teacher = [] if algorithm.teacher.live else [teacher or frozen(policy)]
        self.strict_loading = not policy.adapted  # what is frozen is in no checkpoint
        self._parts: list[MicroBatch] = []

    # ---- from an iteration to micro-batches

    def on_train_epoch_start(self) -> None:
        """The iteration's rows, split into micro-batches."""
        self._started = time.perf_counter()
        it, trainer = self.iteration, self.run_config.trainer
        for name in (*self.streams, "total"):
            it.metrics.total(f"loss/{name}", 0.0)  # also where no row has the stream
        self._check_fresh(it)
        self._parts = self.micro_batches(
            self.samples(it), trainer.minibatches, trainer.micro_batches
        )

    def samples(self, it: Iteration) -> list[Sample]:
        """reduce -> credit -> score -> shape."""
        sums = sum_over_ranks(self.algorithm.statistics(it))
        shaped = self.algorithm.shape(self.score(self.algorithm.credit(it, sums)), it)
        if self.run_config.trainer.minibatches > 1:
            return shaped
        # The only step is taken where pi_old is: its forward gives l_old, and a ratio of exactly 1.
        return [
            replace(s, scores={name: x for name, x in s.scores.items() if name != "old"})
            for s in shaped
        ]

    def _check_fresh(self, it: Iteration) -> None:
        completions = [
            *(turn.completion for g in it.groups for t in g.trajectories for turn in t.turns),
            *(skill.completion for skill in it.skills if isinstance(skill, WrittenSkill)),
            *(turn.completion for r in it.replays for t in r.treated for turn in t.turns),
        ]
        stale = {c.policy_version for c in completions} - {self.version}
        if stale:
            raise EngineError(
                f"the engine sampled with policy version {sorted(stale)}, "
                f"the policy is {self.version}"
            )

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Add no-grad log-probs of the current policy: ``old`` (if several steps follow), each
        teacher view, reference. Only where something reads them.
        """
        scores: list[dict[str, Tensor]] = [dict(s.scores) for s in samples]
        whole = [
            (i, s.ids, s.mask, torch.arange(s.n)) for i, s in enumerate(samples) if self._reads(s)
        ]
        if self.run_config.trainer.minibatches > 1 or self.algorithm.shapes:
            self._score(self.policy, "old", whole, samples, scores)
        views: dict[str, list[tuple[int, Tensor, Tensor, Tensor]]] = {}
        for i, s in enumerate(samples):
            for name, v in s.views.items():
                if self._reads(s, name):
                    views.setdefault(name, []).append((i, v.ids, v.mask, v.index))
        for name in sum_over_ranks(dict.fromkeys(views, ())):
            teacher = self._teacher[0] if self._teacher else self.policy
            self._score(teacher, name, views.get(name, []), samples, scores)
        readers = {name for name, stream in self.streams.items() if stream.reference}
        if readers and self._reference:
            rows = [w for w in whole if self._teaches(samples[w[0]], readers)]
            self._score(self._reference[0], "reference", rows, samples, scores)
        return [replace(s, scores=got) for s, got in zip(samples, scores, strict=True)]

    @torch.no_grad()
    def _score(
        self,
        policy: nn.Module,
        name: str,
        views: list[tuple[int, Tensor, Tensor, Tensor]],
        samples: Sequence[Sample],
        scores: list[dict[str, Tensor]],
    ) -> None:
        """Fill ``scores[i][name]`` in exactly as many forwards on every rank."""
        trainer, device = self.run_config.trainer, self.policy.device
        parts = trainer.minibatches * trainer.micro_batches  # as many rows at once as in training
        for part in split(
            views, [v[1] for v in views], [v[2] for v in views], parts, self.policy.packs
        ):
            null = null_sample()
            ids, mask = pad(
                [v[1] for v in part] or [null.ids], [v[2] for v in part] or [null.mask], device
            )
            counts = [int(v[2].sum()) for v in part]
            temperature = torch.cat(
                [
                    torch.full((n,), samples[v[0]].temperature)
                    for n, v in zip(counts, part, strict=True)
                ]
                or [torch.ones(1)]
            )
            logp = policy(ids, mask, temperature.to(device))[0].cpu()
            for (i, _, _, index), values in zip(
                part, logp.split(counts) if part else (), strict=True
            ):
                scores[i][name] = torch.full((samples[i].n,), torch.nan).index_copy(
                    0, index, values
                )

    def micro_batches(
        self, samples: Sequence[Sample], minibatches: int, micro: int
    ) -> list[MicroBatch]:
        """Exactly minibatches * micro parts; denominators are those of each optimizer step, over
        all ranks. Rows that teach nothing count in them, but need no forward.
        """
        order = sorted(samples, key=lambda s: len(s.ids))
        done = []
        for k in range(minibatches):
            chosen = order[k::minibatches]  # all lengths and kinds of rows in each step
            weights = {
                name: (
                    sum(float(s.credits[name].weight.sum()) for s in chosen if name in s.credits),
                )
                for name in self.streams
            }
            denominators = {name: total for name, (total,) in sum_over_ranks(weights).items()}
            # where none teaches, all are looked at: an update has metrics
            taught = [s for s in chosen if self._teaches(s, self.streams)] or chosen
            ids, masks = [s.ids for s in taught], [s.mask for s in taught]
            split_up = split(taught, ids, masks, micro, self.policy.packs)
            done += [MicroBatch(part, denominators) for part in split_up]
        return done

    def _reads(self, sample: Sample, view: str = "") -> bool:
        """Whether anything may read the scores of a row, or of one view of it."""
        if type(self.algorithm).shape is not Algorithm.shape:  # it may, whatever the credits are
            return True
        return self._teaches(sample, {view} & self.streams.keys() or self.streams)

    def _teaches(self, sample: Sample, streams: Iterable[str]) -> bool:
        """Whether a term of these is not 0, as all are where their value is (e.g. advantages of a
        group of equal rewards).
        """
        own = (sample.credits[name] for name in streams if name in sample.credits)
        return any(bool((credit.weight * credit.value).any()) for credit in own)

    # ---- the update

    def training_step(self, micro: MicroBatch, batch_idx: int) -> Tensor:
        """The objective, scaled so that what Lightning averages (micro-batches, ranks) becomes the
        stated sum.
        """
        loss = self.objective(micro)
        if not torch.isfinite(loss):
            raise DivergedError(
                f"loss is {float(loss)} in update {self.version + 1}; "
                "lower optim.lr or the coefficients"
            )
        trainer = self.trainer
        return loss * loss_scale(
            trainer.strategy, trainer.accumulate_grad_batches, trainer.world_size
        )

    def objective(self, micro: MicroBatch) -> Tensor:
        """This micro-batch's share of the sum of all stream terms."""
        # Not the module's own device, which nobody sets where the policy is split over ranks.
        batch = collate(micro.samples or [null_sample()], self.policy.device)
        logp, batch.entropy = self.policy(
            batch.ids, batch.mask, batch.temperature, "entropy" in self.streams
        )
        fixed = logp.detach()
        known = {name: ~s.isnan() for name, s in batch.scores.items()}
        batch.scores = {
            name: torch.where(known[name], s, fixed) for name, s in batch.scores.items()
        }
        batch.old_logprobs = batch.scores.get("old", fixed)
        cap = self.run_config.rollout.importance_cap
        batch.importance = importance(batch.old_logprobs, batch.engine_logprobs, cap)
        # Both outputs on every rank, even where no row has the stream: ZeRO-3 fetches weights by
        # what a backward pass meets, and a rank that meets less leaves the others waiting.
        loss: Tensor = (logp.sum() + batch.entropy.sum()) * 0.0
        for name, term in self.terms(batch, logp, micro.denominators).items():
            self.iteration.metrics.total(f"loss/{name}", float(term.detach()))
            loss = loss + term
        self.iteration.metrics.total("loss/total", float(loss.detach()))
        if micro.samples:
            self._diagnose(batch, fixed, known)
        return loss

    def terms(
        self, batch: TokenBatch, logp: Tensor, denominators: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """coef * sum(weight * importance * loss(value)) / sum(weight over all micro-batches and
        ranks), by stream.
        """
        assert batch.importance is not None
        done = {}
        for name, stream in self.streams.items():
            if name in batch.credits and denominators[name] > 0:
                weight, value = batch.credits[name]
                loss = stream.loss(batch, logp, value)
                if stream.sampled:
                    loss = loss * batch.importance
                done[name] = stream.coef * (weight * loss).sum() / denominators[name]
        return done

    def _diagnose(self, batch: TokenBatch, logp: Tensor, known: Mapping[str, Tensor]) -> None:
        """Distances of the policy from engine, reference and teachers; ``known`` {name: [N]}."""
        metrics = self.iteration.metrics
        assert batch.old_logprobs is not None
        assert batch.entropy is not None
        d = (batch.engine_logprobs - batch.old_logprobs)[~batch.engine_logprobs.isnan()]
        if d.numel():  # of the policy that sampled
            metrics.mean("policy/mismatch_kl_mean", _k3(-d), d.numel())
            metrics.maximum("policy/mismatch_max", float(d.abs().max()))
            if cap := self.run_config.rollout.importance_cap:
                w = importance(-d, torch.zeros_like(d), cap)
                metrics.mean("policy/importance_mean", float(w.mean()), d.numel())
                cut = int((-d > max(math.log(cap), SAME)).sum())
                metrics.fraction("policy/importance_truncated_frac", cut, d.numel())
        metrics.mean("policy/entropy_mean", float(batch.entropy.detach().mean()), d.numel())
        for name in known:
            gap = (batch.scores[name] - logp)[known[name]]
            if not gap.numel():
                continue
            if name == "old":  # how far the steps of this update have gone
                metrics.mean("policy/update_kl_mean", _k3(gap), gap.numel())
                metrics.maximum("policy/ratio_max", float((-gap).exp().max()))
                continue
            if name == "reference":
                metrics.mean("policy/kl_mean", _k3(gap), gap.numel())
            else:
                metrics.mean(f"policy/{name}_gap_mean", float(gap.mean()), gap.numel())
                metrics.mean(f"policy/{name}_gap_abs_mean", float(gap.abs().mean()), gap.numel())
            stream = self.streams.get(name)
            if stream and stream.gate:
                gate = stream.gate(batch, logp)[known[name]]
                metrics.mean(f"policy/{name}_gate_mean", float(gate.mean()), gate.numel())
                open_ = float((gate > 0.5).float().mean())
                metrics.mean(f"policy/{name}_gate_open_frac", open_, gate.numel())

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm and record it as it was before."""
        if isinstance(self.trainer.strategy, Zero3Strategy):
            return  # it clips by itself, and tells
        limit = gradient_clip_val or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), limit, error_if_nonfinite=False
        )
        self.stepped(float(norm), optimizer)

    def stepped(self, norm: float, optimizer: Any) -> None:
        """Record a step and the gradient's norm before clipping. DivergedError if it is no
        number.
        """
        if not math.isfinite(norm):
            raise DivergedError(
                f"gradient norm is {norm} in update {self.version + 1}; lower optim.lr"
            )
        self.iteration.metrics.mean("optim/grad_norm", norm)
        self.iteration.metrics.mean(keys.LR, optimizer.param_groups[0]["lr"])

    def close_update(self) -> float:
        """Forget the micro-batches; seconds that credit, scoring and training took.

        Called by the first callback: Lightning runs this module's own on_train_epoch_end after
        the callbacks', when the metrics have been written.
        """
        self._parts = []
        if not all(share(p).isfinite().all() for p in self.policy.trained()):
            raise DivergedError(f"weights are no numbers after update {self.version + 1}")
        how = self.algorithm.teacher
        if how.ema or (how.every and (self.version + 1) % how.every == 0):
            for copied in self._teacher:
                follow(copied, self.policy, how.ema)
        return time.perf_counter() - self._started

    def forwards(self) -> dict[str, int]:
        """{key: forwards of policy, reference and teacher, and their tokens} since the last call.
        Generation is no part of them.
        """
        done = {keys.FORWARDS: 0, keys.FORWARD_TOKENS: 0}
        for policy in (self.policy, *self._reference, *self._teacher):
            if isinstance(policy, Policy):  # else it runs the policy itself
                done[keys.FORWARDS] += policy.forwards
                done[keys.FORWARD_TOKENS] += policy.tokens
                policy.forwards = policy.tokens = 0
        return done

    @property
    def _lr(self) -> float:
        """Without any term nothing is learned: not even weight decay may change the policy."""
        return self.run_config.optim.lr if self.streams else 0.0

    def configure_optimizers(self) -> Any:
        """AdamW on all trained weights, with the schedule's learning rate."""
        o, t = self.run_config.optim, self.run_config.trainer
        optimizer = torch.optim.AdamW(
            self.policy.trained(),
            lr=self._lr,
            betas=(o.betas[0], o.betas[1]),
            weight_decay=o.weight_decay,
        )
        if o.schedule == "constant" and not o.warmup:
            return optimizer
        factor = partial(lr_factor, o.schedule, o.warmup, t.updates * t.minibatches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    # ---- what callbacks use

    @property
    def codec(self) -> Codec:
        """Ids to text."""
        return self.player.codec

    def play(
        self,
        tasks: Sequence[Task],
        role: Role,
        n: int,
        temperature: float,
        update: int,
        phase: str | None = None,
        progress: Callable[[int], None] = lambda n: None,
    ) -> list[RolloutGroup]:
        """Play each task n times with the weights as they are; see ``Player.play``.

        ``phase`` is one of the algorithm's, the first one if it is not said.
        """
        phase = phase or self.algorithm.phases[0]
        how = Sampling.of(self.run_config, temperature)
        jobs = [
            Job(task, role, i, update, context=self.algorithm.context(task, phase))
            for task in tasks
            for i in range(n)
        ]
        played = self.player.play(jobs, how, progress)
        return [
            RolloutGroup(task, tuple(played[k * n : (k + 1) * n])) for k, task in enumerate(tasks)
        ]

    # ---- what Lightning needs

    def train_dataloader(self) -> DataLoader[MicroBatch]:
        """A fixed number of micro-batches per epoch, looked up only once they are made."""
        trainer = self.run_config.trainer
        parts = _Parts(self, trainer.minibatches * trainer.micro_batches)
        return DataLoader(parts, batch_size=None, shuffle=False, collate_fn=_as_is)

    def on_fit_start(self) -> None:
        """The copies follow the policy to its device; shares are there."""
        for copied in (*self._reference, *self._teacher):
            if not sharded(copied):
                copied.to(self.policy.device)
            elif isinstance(copied, Policy):  # shares are there now, and the policy was checked
                copied.packs = self.policy.packs

    def on_train_start(self) -> None:
        """A resumed optimizer has the learning rate of its checkpoint; the config's counts."""
        o, lr = self.run_config.optim, self._lr
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                before = group.get("initial_lr", group["lr"])
                group["lr"] *= lr / before if before else 0.0  # the schedule's share
                group.update(betas=tuple(o.betas), weight_decay=o.weight_decay)
                if "initial_lr" in group:
                    group["initial_lr"] = lr
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.base_lrs = [lr for _ in config.scheduler.base_lrs]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Version and the algorithm's state, as plain containers."""
        checkpoint["rsipo"] = {
            "version": self.version,
            "algorithm": self.algorithm.state_dict(),
            "teacher": [state_of(copied) for copied in self._teacher],
        }
        if "state_dict" in checkpoint:  # not under ZeRO-3, which keeps what is trained
            kept, state = self.policy.kept_state(), checkpoint["state_dict"]
            checkpoint["state_dict"] = {f"policy.{name}": state[f"policy.{name}"] for name in kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over version and the algorithm's state."""
        self.version = checkpoint["rsipo"]["version"]
        self.algorithm.load_state_dict(checkpoint["rsipo"]["algorithm"])
        for copied, state in zip(self._teacher, checkpoint["rsipo"]["teacher"], strict=True):
            restore(copied, state)


def lr_factor(schedule: str, warmup: int, total: int, step: int) -> float:
    """Share of ``optim.lr`` at a step: a linear rise, then constant, linear or cosine decay.

    >>> [lr_factor("linear", 2, 10, step) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / max(total - warmup, 1)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[
        schedule
    ]


def _k3(gap: Tensor) -> float:
    """Mean of exp(x) - x - 1: an estimate of KL(p || q) for x = log q - log p on samples of p."""
    return float((gap.exp() - gap - 1).mean())


class _Parts(Dataset[MicroBatch]):
    def __init__(self, module: PolicyModule, length: int) -> None:
        self.module, self.length = module, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> MicroBatch:
        return self.module._parts[index]


def _as_is(item: Any) -> Any:
    return item
