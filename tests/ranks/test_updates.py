"""On the same trajectories one process, two DDP ranks and two ZeRO-3 ranks make the same update."""

import copy
import json
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rsipo_lightning import ranks, registry
from rsipo_lightning.adapter import adapter_layers
from rsipo_lightning.frozen import AdapterOff
from rsipo_lightning.testing import (
    ToyWorld,
    adapted_policy,
    gradient,
    make_algorithm,
    toy_world,
)

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("updates.py")
WORLD = toy_world()
# So large that a mistake of any term shows.
STRONG = {"kl": 0.1, "entropy": 0.01, "distill": 0.3, "skill": 0.5, "n_min": 1, "trust_slope": 1.0}
STRONG |= {"episode": 0.3, "step": 0.4}
NAMES = ("grpo", "seed", "opid", "rsipo")
CLIP = 0.25  # of the norm

Case = dict[str, Any]
RANK = 4
POLICY = adapted_policy(copy.deepcopy(WORLD.policy), RANK)
LORA = ToyWorld(POLICY, WORLD.codec.tokenizer, AdapterOff(POLICY))


def case(name: str, micro: int, alone: bool = False, **more: Any) -> Case:
    """``alone``: the second rank has no trainable tokens."""
    known = {f.name for f in fields(registry.load("algorithms", name).Config)}
    keys = {key: value for key, value in STRONG.items() if key in known}
    return {"algo": name, "keys": keys, "micro": micro, "alone": alone, **more}


def expected(c: Case) -> tuple[torch.Tensor, dict[str, float]]:
    """Update and trust of one process."""
    algorithm = make_algorithm(c["algo"], WORLD.codec, **c["keys"])
    world = LORA if c.get("lora") else WORLD
    m = world.module(algorithm, WORLD.iteration(algorithm))
    update = gradient(m, m.samples(m.iteration), 1)
    return update, dict(m.iteration.trust)


NORM = {name: float(expected(case(name, 1))[0].norm()) for name in NAMES}
CASES: dict[str, Case] = {
    f"{name}-{micro}{'-alone' * alone}": case(name, micro, alone)
    for name in NAMES
    for micro, alone in ((1, False), (2, False), (5, False), (2, True))
}
CASES["recompute"] = case("rsipo", 2, recompute=True)
CASES["lora"] = case("rsipo", 2, lora=RANK)
CASES["lora-recompute"] = case("grpo", 5, alone=True, lora=RANK, recompute=True)
BF16 = {"bf16": case("rsipo", 2, bf16=True)}  # ZeRO-3 alone
BF16["bf16-lora"] = case("rsipo", 2, bf16=True, lora=RANK)
CASES["clipped"] = case("rsipo", 2, clip=CLIP * NORM["rsipo"])
FAULTS = {
    # several backward passes in one training step: only the last one's gradient survives
    "manual": case("rsipo", 2, fault="manual"),
    # the loss is divided by the number of micro-batches twice
    "once": case("rsipo", 2, fault="once"),
}


@pytest.fixture(scope="module", params=["ddp", "zero3"])
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "zero3" and not find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    return name


@pytest.fixture(scope="module")
def made(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases on two ranks."""
    out = tmp_path_factory.mktemp("updates") / f"{strategy}.pt"
    cases = {**CASES, **(BF16 | FAULTS if strategy == "zero3" else {})}
    command = [sys.executable, str(WORKER), strategy, str(out), json.dumps(cases)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        failed = ranks.launch(command, 2)
    assert failed is None, failed
    updates: dict[str, Any] = torch.load(out)
    return updates


def distance(made: dict[str, Any], name: str, c: Case) -> float:
    """Of an update from that of one process, in units of its norm."""
    update, _ = expected(c)
    return float((made[name]["update"] - update).norm() / update.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "clipped"])
def test_the_update_is_that_of_one_process(made: dict[str, Any], name: str) -> None:
    update, trust = expected(CASES[name])
    assert distance(made, name, CASES[name]) < 1e-5
    assert made[name]["trust"] == pytest.approx(trust, abs=1e-9)
    norm = made[name]["norm"]
    assert norm is None or norm == pytest.approx(float(update.norm()), rel=1e-5)


@pytest.mark.slow
def test_an_engine_of_its_own_gets_the_adapter_merged(made: dict[str, Any]) -> None:
    """Whole weights of the plain model; an update changes the adapted ones and no other."""
    plain = dict(WORLD.policy.model.named_parameters())
    acting, adapted = made["lora"]["acting"], adapter_layers(POLICY.model)
    assert acting.keys() == plain.keys()
    assert {name for name in plain if not torch.equal(plain[name], acting[name])} == set(adapted)
    one, two = (made[name]["acting"] for name in ("lora", "lora-recompute"))
    assert all(torch.equal(one[name], two[name]) for name in plain if name not in adapted)
    assert not any(torch.equal(one[name], two[name]) for name in adapted)


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_bfloat16_is_near(strategy: str, made: dict[str, Any], name: str) -> None:
    """Its numbers have three digits."""
    if strategy == "ddp":
        pytest.skip("float32 only")
    assert 1e-4 < distance(made, name, BF16[name]) < 0.1


@pytest.mark.slow
def test_clipping_clips_what_it_says(made: dict[str, Any]) -> None:
    """And the norm that is logged is the one before."""
    update, _ = expected(CASES["clipped"])
    change = made["clipped"]["update"]
    assert float((change - CLIP * update).norm()) < 1e-5 * NORM["rsipo"]
    assert float(change.norm()) == pytest.approx(CLIP * NORM["rsipo"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_known_faults_would_be_seen(strategy: str, made: dict[str, Any], name: str) -> None:
    if strategy == "ddp":
        pytest.skip("faults of DeepSpeed")
    assert distance(made, name, FAULTS[name]) > 0.1
