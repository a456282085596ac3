"""Small real parts: tokenizer, policy, algorithm, groups, and whole iterations."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rsipo_lightning import registry
from rsipo_lightning.adapter import attach
from rsipo_lightning.algorithms.base import TRAIN, Algorithm
from rsipo_lightning.bank import SkillBank
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import LoraSection, RunConfig
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy
from rsipo_lightning.tiny import TEMPLATE
from rsipo_lightning.types import (
    Completion,
    Iteration,
    Prompt,
    ReplayRequest,
    ReplayResult,
    RolloutGroup,
    Sample,
    Skill,
    SkillRequest,
    Stop,
    Task,
    Trajectory,
    Turn,
    WrittenSkill,
)

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_tokenizer(corpus: Iterable[str] = (), size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a short chat template; reads any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_policy(
    vocab: int, seed: int = 0, *, scale: float = 0.2, layers: int = 2, dim: int = 64
) -> Policy:
    """An untrained Qwen2 with heads of 32; ``scale`` is the spread of its weights (larger: less
    uniform).
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=dim // 32,
        num_key_value_heads=dim // 32,
        max_position_embeddings=4096,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return Policy(Qwen2ForCausalLM(config))


def adapted_policy(policy: Policy, rank: int = 4, targets: Sequence[str] = ()) -> Policy:
    """With a LoRA adapter that has learned something: none of its weights is 0."""
    attach(policy.model, LoraSection(rank, targets=list(targets)), 0)
    made = Policy(policy.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.trained():
            if not parameter.any():
                parameter.normal_(std=0.05, generator=generator)
    return made


BANK = SkillBank(
    "toy",
    ("- look first",),
    {"type0": ("- say it at once",), "type1": ("- say it twice",)},
    {},
)


def make_algorithm(
    name: str | type[Algorithm[Any]], codec: Codec | None = None, **keys: Any
) -> Algorithm[Any]:
    """A registered algorithm, or a class, with these keys; ``BANK`` is its skill bank, if it uses
    one.
    """
    chosen = registry.load("algorithms", name) if isinstance(name, str) else name
    config = chosen.Config(**keys)
    made: Algorithm[Any] = chosen(config, 0, codec, BANK if chosen.uses_bank(config) else None)
    return made


def toy_group(name: str, outcomes: str, kind: str = "type0", turns: int = 1) -> RolloutGroup:
    """Made-up episodes: "1" a success, "0" a failure, "e" a broken one. No engine, no text."""
    task = Task(name, "toy", kind, {})
    said = Completion((4, 5), (-1.0, -1.0), "x", False, 0)
    return RolloutGroup(
        task,
        tuple(
            Trajectory(
                task,
                i,
                tuple(
                    Turn(
                        (1, 2, 3, *(4, 5, 6) * k),
                        1,
                        said,
                        "a",
                        "seen",
                        float(o == "1" and k == turns - 1),
                        True,
                    )
                    for k in range(turns)
                ),
                o == "1",
                float(o == "1"),
                Stop.ERROR if o == "e" else Stop.DONE,
                max_steps=4,
                opening=f"Your question: {name}?",
            )
            for i, o in enumerate(outcomes)
        ),
    )


class ToyWorld:
    """Real conversations of a policy with nobody: its own samples, answered with "seen k".

    ``iteration(algorithm)`` is three tasks of two types with four rollouts each, and what the
    algorithm asks for: skills (that of the last request is invalid) and replays with their gains.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerFast,
        reference: nn.Module | None = None,
    ) -> None:
        self.policy, self.reference = policy, reference
        self.codec = Codec(tokenizer)
        self.engine = HFEngine(policy, tokenizer)
        self._said: dict[Prompt, Completion] = {}  # the policy stays as it is

    def sampled(self, prompt: Sequence[int], seed: int, tokens: int) -> Completion:
        """What the policy says."""
        request = Prompt(tuple(prompt), tokens, 1.0, seed, self.codec.stop_ids)
        if request not in self._said:
            self._said[request] = self.engine.generate([request])[0]
        return self._said[request]

    def episode(
        self, task: Task, index: int, success: bool, skill: Skill | None = None, context: str = ""
    ) -> Trajectory:
        """One to four turns."""
        rng = random.Random(f"{task.id}{index}{skill is not None}")
        opening = f"Your question: {task.id}?\nAnswer."
        ids, anchor = self.codec.start(opening, skill.text if skill else context)
        turns: list[Turn] = []
        for k in range(steps := rng.randint(1, 4)):
            completion = self.sampled(ids, rng.randrange(10**6), rng.randint(1, 9))
            reward = float(success and k == steps - 1)
            turns.append(Turn(ids, anchor, completion, "a", f"seen {k}", reward, True))
            ids = self.codec.extend(ids + completion.ids, f"seen {k}")
        return Trajectory(
            task,
            index,
            tuple(turns),
            success,
            float(success),
            Stop.DONE,
            4,
            opening=opening,
            skill=skill,
            context="" if skill else context,
        )

    def groups(self, algorithm: Algorithm[Any], broken: int = 0) -> list[RolloutGroup]:
        """Each has one or two successes; the first ``broken`` episodes of each broke."""
        done = []
        for i in range(3):
            task = Task(f"t{i}", "toy", f"type{i % 2}", {})
            context = algorithm.context(task, TRAIN)
            played = [
                self.episode(task, k, success=(k + i) % 3 == 0, context=context) for k in range(4)
            ]
            for k in range(broken):
                played[k] = replace(played[k], stop=Stop.ERROR, success=False, score=9.0)
            done.append(RolloutGroup(task, tuple(played)))
        return done

    @staticmethod
    def of_server(skill: Skill) -> Skill:
        """The same text, which nobody here has sampled."""
        return Skill(*(getattr(skill, f.name) for f in fields(Skill)))

    def skill(self, request: SkillRequest, seed: int, invalid: bool) -> WrittenSkill:
        """Fixed advice; what was sampled for it are real tokens."""
        task, trajectory = request.trajectory.task, request.trajectory
        prompt = self.codec.start(f"Your question: write {task.id}")[0]
        turns = range(trajectory.steps)[: request.step_skills]
        return WrittenSkill(
            task,
            "look first, then answer it now",
            "procedural",
            "no JSON object" if invalid else "",
            trajectory=trajectory,
            steps={k: f"now say {k}" for k in turns if k % 2 == 0},
            prompt_ids=prompt,
            completion=self.sampled(prompt, seed, 12),
        )

    def replay(self, plan: ReplayRequest, gain: float | None) -> ReplayResult:
        """Two replays, whatever the plan asks for, and a made-up gain."""
        task = plan.skill.task
        treated = tuple(self.episode(task, k, True, plan.skill) for k in range(2))
        noise = None if gain is None else 0.01
        return ReplayResult(plan.skill, treated, plan.control, gain, noise)

    def iteration(
        self,
        algorithm: Algorithm[Any],
        update: int = 0,
        broken: int = 0,
        *,
        tasks: int = 3,
        valid: bool = True,
        lost: bool = False,
    ) -> Iteration:
        """As the callbacks fill it. ``valid`` False: no skill can be read; ``lost``: no gain could
        be measured.
        """
        groups = self.groups(algorithm, broken)[:tasks]
        it = Iteration(update, [g.task for g in groups], Metrics())
        it.groups = groups
        proposed = list(algorithm.propose(it))
        it.skills = [
            p if isinstance(p, Skill) else self.skill(p, i, i == len(proposed) - 1 or not valid)
            for i, p in enumerate(proposed)
        ]
        if algorithm.analyzer:
            it.skills = [self.of_server(s) for s in it.skills]
        it.replays = [
            self.replay(plan, None if lost else 0.25 * (i + 1))
            for i, plan in enumerate(algorithm.plan(it))
        ]
        return it

    def module(self, algorithm: Algorithm[Any], it: Iteration) -> PolicyModule:
        """The trainer's module with this iteration, and nobody to play with."""
        m = PolicyModule(self.policy, algorithm, RunConfig(), None, self.reference)  # type: ignore[arg-type]
        m.iteration = it
        return m


def gradient(m: PolicyModule, samples: Sequence[Sample], micro: int) -> Tensor:
    """Of an update with these rows in so many micro-batches, all parameters in a row."""
    m.policy.zero_grad()
    for part in m.micro_batches(samples, 1, micro):
        torch.autograd.backward(m.objective(part))
    return torch.cat([p.grad.flatten() for p in m.policy.parameters() if p.grad is not None])
