"""Every YAML that is shipped, and every registered component, makes a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rsipo_lightning import composing, registry
from rsipo_lightning.composing import FIT, SFT, compose, compose_kind, members, plain, to_yaml
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.memory import GIB, architecture, estimate

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name != "prompts"  # texts, not values
)


def kind_of(file: str) -> Any:
    return SFT if file.startswith("sft/") or "/sft-" in file else FIT


def flags_for(file: str) -> dict[str, str]:
    """A choice of groups that applies the file."""
    flags = {"algo": "rsipo", "env": "search"}
    *folders, name = Path(file).with_suffix("").parts
    if folders[0] == "sft":
        return {"sft": name, "env": "search"}
    if name.startswith("sft-"):
        model, env = folders[1].split("-", 1)
        recipe = name.removeprefix("sft-")
        return {"sft": "seed" if recipe == "common" else recipe, "env": env, "model": model}
    if folders[0] == "pairs":
        algo, env = name.split("-", 1)
        return {"algo": algo, "env": env}
    if folders[0] == "tuned":
        model, env = folders[1].split("-", 1)
        return {"algo": "rsipo" if name == "common" else name, "env": env, "model": model}
    return {**flags, folders[0]: name}


def leaves(patch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in patch.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "use":
            yield f"{prefix}{name}", value


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_applied_and_says_only_what_differs(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of(file)
    origins = compose_kind(kind, flags_for(file)).origins
    patch = OmegaConf.to_container(OmegaConf.load(CONFIGS / file))
    assert isinstance(patch, dict)
    keys = dict(leaves(patch))
    assert {key for key, origin in origins.items() if origin == f"configs/{file}"} <= set(keys)
    assert set(keys) <= set(origins)

    monkeypatch.setattr(composing, "_patches", lambda *_: [])
    defaults = plain(compose_kind(kind, flags_for(file)).config)
    same = [key for key, value in keys.items() if at(defaults, key) == value]
    if not file.startswith("tuned/"):  # which may set a value back that a lower file has changed
        assert same == [], "these are the dataclass's defaults"


@pytest.mark.parametrize("kind", [FIT, SFT], ids=["fit", "sft"])
@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in ("model", "env", "trainer", "engine") for name in members(group)],
)
def test_a_preset_serves_every_kind_of_run(kind: Any, group: str, name: str) -> None:
    flags = {"algo": "rsipo", "env": "search", group: name}
    compose_kind(kind, {g: flags.get(g) for g in kind.groups})


@pytest.mark.parametrize(("kind", "other"), [(FIT, SFT), (SFT, FIT)], ids=["fit", "sft"])
def test_a_run_takes_the_config_of_the_other_kind(kind: Any, other: Any, tmp_path: Path) -> None:
    given = compose_kind(other, {"algo": "rsipo", "env": "search"}, None, ["rollout.group=3"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(given.config))
    config = compose_kind(kind, {"algo": "grpo"}, file).config
    assert (config.rollout.group, config.groups["env"]) == (3, "search")
    file.write_text("groups: {env: search, algo: grpo}\ntrainer: {update: 3}")
    with pytest.raises(ConfigError, match=r"no key 'trainer\.update'"):
        compose_kind(kind, {}, file)


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_what_it_is_in_its_first_line(file: str) -> None:
    assert (CONFIGS / file).read_text().startswith("# ")


@pytest.mark.parametrize("env", registry.names("environments"))
@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_every_algorithm_composes_with_every_environment(algo: str, env: str) -> None:
    config, _ = compose_kind(FIT, {"algo": algo, "env": env})
    for group, kind in (("algo", "algorithms"), ("env", "environments")):
        loaded = registry.load(kind, config.groups[group])
        assert type(getattr(config, group)) is loaded.Config


def test_presets_of_search_are_the_published_protocols() -> None:
    """With the papers' values of the model, and with what the paper says of RSIPO on search."""

    def keys(env: str) -> list[Any]:
        config = compose_kind(FIT, {"algo": "rsipo", "env": env, "model": "hf"}).config
        e, r = config.env, config.rollout
        episode = [e.context, e.max_steps, e.topk, e.invalid_penalty, e.template]
        return [*episode, r.context, r.max_new_tokens, config.algo.invalid_penalty]

    assert keys("search") == ["append", 4, 3, 0.01, None, 4096, 512, 0.0]
    assert keys("search_r1") == ["append", 5, 3, 0.0, "search_r1", 4096, 512, 0.0]
    assert keys("search_verl") == ["window", 4, 3, 0.01, None, 4608, 512, 0.0]
    tiny = compose_kind(FIT, {"algo": "rsipo", "env": "search_verl"}).config
    assert (tiny.env.prompt, tiny.env.topk, tiny.env.history) == ("compact", 3, 4)


def test_presets_of_alfworld_are_the_published_protocols() -> None:
    """With the papers' values of the model (methods.md 7.1)."""

    def keys(env: str) -> list[Any]:
        config = compose_kind(FIT, {"algo": "step_opsd", "env": env, "model": "hf"}).config
        e, r, a = config.env, config.rollout, config.algo
        episode = [e.context, e.history, e.max_steps, e.invalid_penalty, e.admissible]
        return [*episode, r.tasks, r.group, r.max_new_tokens, a.kl, a.entropy, a.span]

    shared = [0.1, "always", 16, 8, 512, 0.01, 0.001, "action"]
    assert keys("alfworld") == ["window", 2, 50, *shared]
    assert keys("alfworld_30") == ["window", 5, 30, *shared]


MODELS = {
    "qwen2_5_3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3_1_7b": "Qwen/Qwen3-1.7B",
}


@pytest.mark.parametrize(
    ("env", "tasks", "kl", "penalty", "warmup", "steps"),
    [
        ("alfworld", 16, 0.01, 0.1, 0, 8),
        ("alfworld_30", 16, 0.01, 0.1, 0, 6),
        ("search", 128, 0.001, 0.01, 15, 10),
        ("search_verl", 128, 0.001, 0.01, 15, 10),
    ],
)
@pytest.mark.parametrize("algo", ["grpo", "rsipo", "sdar", "seed", "opid"])
@pytest.mark.parametrize("model", MODELS)
def test_presets_of_models_are_the_papers_runs(
    model: str, algo: str, env: str, tasks: int, kl: float, penalty: float, warmup: int, steps: int
) -> None:
    """Whatever stands in a file and whatever is a default (methods.md 7.1)."""
    config = compose(algo=algo, env=env, model=model, trainer="zero3_8gpu")
    t, o, r, a = config.trainer, config.optim, config.rollout, config.algo
    assert (config.model.path, config.model.dtype) == (MODELS[model], "bfloat16")
    assert (t.strategy, t.devices, t.updates) == ("zero3", 8, 150)
    assert (o.lr, o.weight_decay, o.clip, o.schedule) == (1e-6, 0.01, 1.0, "constant")
    assert (r.tasks, r.group, r.temperature, r.max_new_tokens) == (tasks, 8, 1.0, 512)
    assert (a.kl, a.clip, a.dual_clip, config.env.invalid_penalty) == (kl, 0.2, 3.0, penalty)
    halved = tasks == 128 and algo in ("seed", "opid")  # mini-batches of 512 rows, no entropy term
    assert t.minibatches == (steps // 2 if halved else steps)
    assert o.warmup == warmup * t.minibatches  # .1 of the updates
    assert a.entropy == (0.0 if halved else 0.001)
    qwen3_opid = (model, algo, tasks) == ("qwen3_1_7b", "opid", 16)
    assert a.adv_norm == ("mean" if qwen3_opid else "mean_std")
    assert (config.eval.every, config.eval.val_episodes, config.eval.temperature) == (
        (150, 512, 0.4) if tasks == 128 else (5, 128, 0.4)
    )


@pytest.mark.parametrize("algo", registry.names("algorithms"))
@pytest.mark.parametrize("env", ["alfworld", "search", "search_verl"])
@pytest.mark.parametrize("model", MODELS)
def test_presets_of_models_fit_eight_gpus_of_80_gb(model: str, env: str, algo: str) -> None:
    config = compose(algo=algo, env=env, model=model, trainer="zero3_8gpu")
    estimate(config, architecture(config.model.path)).check(config, 79 * GIB)


@pytest.mark.parametrize("engine", registry.names("engines"))
def test_every_engine_composes(engine: str) -> None:
    flags = {"algo": "grpo", "env": "search", "engine": engine}
    assert compose_kind(FIT, flags).config.groups["engine"] == engine


@pytest.mark.parametrize(
    ("arm", "component", "keys"),
    [
        ("rsipo_no_trust", "rsipo", {"trust": False, "skill": 0.3}),
        ("rsipo_no_skill_evolution", "rsipo", {"trust": True, "skill": 0.0}),
        ("rsipo_no_trust_no_skill_evolution", "rsipo", {"trust": False, "skill": 0.0}),
        ("rsipo_no_shrinkage", "rsipo", {"shrink": False, "distill": 0.1}),
        ("rsipo_bank", "rsipo", {"skill_source": "bank", "distill": 0.1}),
        ("grpo_opsd_code", "grpo_opsd", {"reading": "code"}),
    ],
)
def test_an_arm_is_its_method_with_a_switch(
    arm: str, component: str, keys: dict[str, object]
) -> None:
    """All else is the method's own, what was tuned for it and its values on the environment too."""
    config, own = (compose(algo=name, env="search") for name in (arm, component))
    assert type(config.algo) is type(own.algo)
    changed = {k: v for k, v in vars(config.algo).items() if v != getattr(own.algo, k)}
    assert changed.keys() <= keys.keys()
    assert {k: getattr(config.algo, k) for k in keys} == keys
    assert changed
