"""compose: the order of sources, the origin of each value, and what is said about mistakes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rsipo_lightning import composing, registry
from rsipo_lightning.checks import at_least
from rsipo_lightning.composing import (
    FIT,
    component,
    compose,
    compose_kind,
    members,
    to_yaml,
)
from rsipo_lightning.config import RolloutSection, RunConfig
from rsipo_lightning.errors import ConfigError, PluginError, RsipoError
from rsipo_lightning.protocols import EnvironmentConfig


@dataclass
class MethodConfig:
    replays: int = 4
    trust: bool = True

    def __post_init__(self) -> None:
        at_least("algo.replays", self.replays, 1)


@dataclass
class OtherConfig:
    clip: float = 0.2

    def __post_init__(self) -> None:
        if self.clip > 1:
            raise ValueError("algo.clip is too large")  # a plugin need not know our errors


@dataclass
class WorldConfig(EnvironmentConfig):
    questions: Any = None


@dataclass
class BadConfig:
    thing: object = None  # no type that omegaconf knows


def with_config(config: type) -> type:
    return type("Part", (), {"Config": config})


YAML = {
    "model/tiny": "optim: {lr: 6e-4}\nenv: {prompt: compact}\neval: {temperature: 1}",
    "env/world": "env: {max_steps: 4}\nrollout: {tasks: 5}",
    "trainer/auto": "# Nothing but a comment.",
    "engine/hf": "rollout: {tasks: 6, live: 7}",
    "algo/method": "rollout: {live: 8}\noptim: {clip: 2.0, weight_decay: 0.5}",
    "algo/method_no_trust": "use: method\nalgo: {trust: false}",
    "tuned/tiny-world/method": "optim: {clip: 3.0}",
}


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A registry and a folder of YAML files of our own; gives the folder."""
    module = ModuleType("parts_of_test_config")
    module.method = with_config(MethodConfig)  # type: ignore[attr-defined]
    module.other = with_config(OtherConfig)  # type: ignore[attr-defined]
    module.bad = with_config(BadConfig)  # type: ignore[attr-defined]
    module.world = with_config(WorldConfig)  # type: ignore[attr-defined]
    module.hf = type("NoConfig", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def targets(*names: str) -> dict[str, str]:
        return {name: f"{module.__name__}:{name}" for name in names}

    table = {
        "algorithms": targets("method", "other", "bad") | {"broken": "no_such_module:X"},
        "environments": targets("world"),
        "engines": targets("hf"),
    }
    monkeypatch.setattr(registry, "BUILTIN", table)
    folder = tmp_path / "configs"
    for name, text in YAML.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(composing, "_configs", lambda: folder)
    return folder


def run(*overrides: str, algo: str | None = "method", config: Path | None = None) -> RunConfig:
    return compose(algo=algo, env="world", config=config, overrides=overrides)


def message(*overrides: str, **kwargs: Any) -> str:
    with pytest.raises(RsipoError) as caught:
        run(*overrides, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestOrder:
    def test_each_source_wins_over_those_below_it(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("optim: {weight_decay: 0.25}\nseed: 1\nrollout: {group: 4}")
        config, origins = compose_kind(
            FIT, {"algo": "method", "env": "world"}, file, ["seed=2", "algo.replays=8"]
        )
        # value, origin: from dataclass default up to the command line
        found = {
            "run.root": config.run.root,
            "optim.lr": config.optim.lr,
            "env.max_steps": config.env.max_steps,
            "rollout.tasks": config.rollout.tasks,
            "rollout.live": config.rollout.live,
            "optim.clip": config.optim.clip,
            "optim.weight_decay": config.optim.weight_decay,
            "rollout.group": config.rollout.group,
            "seed": config.seed,
            "algo.replays": config.algo.replays,
        }
        assert {key: (value, origins.get(key)) for key, value in found.items()} == {
            "run.root": ("runs", None),
            "optim.lr": (6e-4, "configs/model/tiny.yaml"),
            "env.max_steps": (4, "configs/env/world.yaml"),
            "rollout.tasks": (6, "configs/engine/hf.yaml"),
            "rollout.live": (8, "configs/algo/method.yaml"),
            "optim.clip": (3.0, "configs/tuned/tiny-world/method.yaml"),
            "optim.weight_decay": (0.25, str(file)),
            "rollout.group": (4, str(file)),
            "seed": (2, "command line"),
            "algo.replays": (8, "command line"),
        }

    def test_sections_of_components_are_instances_of_their_config(self) -> None:
        config = run("env.questions=[a.jsonl, b.jsonl]", "optim.betas=[0.5,0]")
        assert config.algo == MethodConfig(4, True)
        assert config.env == WorldConfig("compact", 4, 0.1, ["a.jsonl", "b.jsonl"])
        assert config.engine == composing.NoKeys()
        assert config.optim.betas == (0.5, 0.0)
        assert config.groups == {
            "model": "tiny",
            "env": "world",
            "trainer": "auto",
            "engine": "hf",
            "algo": "method",
        }

    def test_an_arm_uses_a_registered_component(self) -> None:
        config = run(algo="method_no_trust")
        assert config.algo == MethodConfig(trust=False)
        assert config.groups["algo"] == "method_no_trust"
        assert component("algo", "method_no_trust") == "method"
        assert component("algo", "other") == "other"

    def test_a_preset_starts_from_its_component_and_has_the_last_word(self, parts: Path) -> None:
        for name, text in {
            "algo/method_no_trust": "use: method\nalgo: {trust: false}\noptim: {betas: [0.2, 0.2]}",
            "env/short": "use: world\nenv: {max_steps: 2}",
            "pairs/method-world": "algo: {replays: 5, trust: true}\nenv: {max_steps: 5}",
            "tuned/tiny-world/common": "seed: 3",
            "tuned/tiny-world/method": "optim: {clip: 3.0, betas: [0.3, 0.3]}",
            "tuned/tiny-short/method": "optim: {lr: 0.25}",
        }.items():
            (parts / name).parent.mkdir(exist_ok=True)
            (parts / f"{name}.yaml").write_text(text)
        for algo in ("method", "method_no_trust"):
            plain = compose(algo=algo, env="world")
            short = compose(algo=algo, env="short")
            trust = algo == "method"
            assert (plain.algo, short.algo) == (MethodConfig(5, trust), MethodConfig(5, trust))
            assert (plain.env.max_steps, short.env.max_steps) == (5, 2)
            # tuned for the method, and for the arm but where the arm says otherwise; for no preset
            # of the environment
            own = (0.2, 0.2) if algo == "method_no_trust" else (0.3, 0.3)
            assert (plain.seed, plain.optim.clip, plain.optim.betas) == (3, 3.0, own)
            assert (short.seed, short.optim.clip, short.optim.lr) == (0, 2.0, 0.25)

    def test_members_are_registered_names_and_files(self) -> None:
        assert members("algo") == ["bad", "broken", "method", "method_no_trust", "other"]
        assert members("trainer") == ["auto"]

    def test_keys_inside_a_dict_add_up_and_a_whole_one_replaces(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("env: {questions: {a: 1, b: 2}}")
        for overrides, expected in (
            (["env.questions.c=3", "env.questions.a=4"], {"a": 4, "b": 2, "c": 3}),
            (["env.questions[c]=3"], {"a": 1, "b": 2, "c": 3}),
            (["env.questions={c: 3}"], {"c": 3}),
            (["env.questions={c: 3}", "env.questions.d=4"], {"c": 3, "d": 4}),
            (["env.questions=x"], "x"),
        ):
            assert run(*overrides, config=file).env.questions == expected


class TestSavedConfig:
    def test_what_is_printed_composes_to_the_same_run(self, tmp_path: Path) -> None:
        config, origins = compose_kind(
            FIT,
            {"algo": "method_no_trust", "env": "world"},
            None,
            ["env.questions={c.d/e: 0.5, 'a: #b.jsonl': 2}", "optim.lr=1e-6", "run.dir=x"],
        )
        assert list(config.env.questions.items()) == [("c.d/e", 0.5), ("a: #b.jsonl", 2)]
        assert to_yaml(config, origins).count("# command line") == 3
        file = tmp_path / "saved.yaml"
        for text in (to_yaml(config), to_yaml(config, origins)):
            file.write_text(text)
            assert compose(config=file) == config
            assert list(compose(config=file).env.questions) == list(config.env.questions)

    def test_each_printed_line_says_where_its_value_came_from(self) -> None:
        lines = to_yaml(*compose_kind(FIT, {"algo": "method", "env": "world"})).splitlines()
        assert [line.split() for line in lines if "max_steps" in line or "trust" in line] == [
            ["trust:", "true", "#", "default"],
            ["max_steps:", "4", "#", "configs/env/world.yaml"],
        ]
        assert len({line.index("#") for line in lines if "#" in line}) == 1

    def test_a_flag_wins_over_the_file_and_drops_the_section_of_the_other(
        self, tmp_path: Path
    ) -> None:
        file = tmp_path / "saved.yaml"
        file.write_text(to_yaml(run("algo.replays=7", "seed=3")))
        config = run(algo="other", config=file)
        assert config.algo == OtherConfig()
        assert config.seed == 3
        assert run(algo="method", config=file).algo.replays == 7

    def test_groups_of_a_file_must_be_names_of_groups(self, tmp_path: Path) -> None:
        file = tmp_path / "saved.yaml"
        file.write_text("groups: {alg: method}")
        assert "no group 'alg'; did you mean 'algo'?" in message(config=file)
        file.write_text("groups: method")
        assert "groups must hold group: name" in message(config=file)


class TestKindsOfRun:
    def test_sections_of_the_other_kind_are_left_out(self, parts: Path, tmp_path: Path) -> None:
        """One file, and the presets of models, serve both commands."""
        (parts / "sft").mkdir()
        (parts / "sft" / "scripted.yaml").write_text("sft: {epochs: 2}")
        file = tmp_path / "both.yaml"
        file.write_text(
            "groups: {algo: method, env: world, sft: scripted}\n"
            "optim: {lr: 0.5}\neval: {episodes: 9}\nsft: {batch: 4}\nalgo: {replays: 2}"
        )
        fit = compose(config=file)
        assert (fit.optim.lr, fit.eval.episodes, fit.algo.replays) == (0.5, 9, 2)
        sft = compose_kind(composing.SFT, {}, file).config
        assert (sft.optim.lr, sft.sft.epochs, sft.sft.batch) == (0.5, 2, 4)
        assert not hasattr(sft, "eval")
        assert (sft.method, fit.method) == ("sft-scripted", "method")
        file.write_text("evall: {episodes: 9}")
        with pytest.raises(ConfigError, match="no key 'evall'"):
            compose_kind(composing.SFT, {"env": "world"}, file)

    def test_what_is_tuned_for_one_kind_is_not_for_the_other(self, parts: Path) -> None:
        (parts / "sft").mkdir()
        (parts / "sft" / "scripted.yaml").write_text("sft: {epochs: 2}")
        tuned = parts / "tuned" / "tiny-world"
        (tuned / "common.yaml").write_text("rollout: {tasks: 3}")
        (tuned / "sft-common.yaml").write_text("rollout: {group: 3}")
        (tuned / "sft-scripted.yaml").write_text("optim: {lr: 0.25}")
        sft = compose_kind(composing.SFT, {"env": "world"}).config
        assert (sft.rollout.tasks, sft.rollout.group, sft.optim.lr) == (6, 3, 0.25)
        assert (run().rollout.tasks, run().rollout.group, run().optim.lr) == (3, 8, 6e-4)


class TestMistakes:
    @pytest.mark.parametrize(
        ("override", "says"),
        [
            ("algo.replay=1", "no key 'algo.replay'; did you mean 'algo.replays'? (command line)"),
            ("updates=3", "no key 'updates'; did you mean 'trainer.updates'?"),
            ("rollout.updates=3", "did you mean 'trainer.updates'?"),
            ("lrr=1", "did you mean 'optim.lr'?"),
            ("engine.x=1", "no key 'engine.x'"),
            ("zzzzzz=1", "--print-config shows all keys"),
            ("seed", "'seed' is not key=value"),
            ("=1", "'=1' is not key=value"),
            ("seed=[1", "seed: '[1' is not a value"),
            ("seed=a", "seed=a: Value 'a' of type 'str' could not be converted to Integer"),
            ("seed=" + "9" * 5000, "seed: '999"),
            ("env.questions" + ".a" * 100 + "=1", "maximum recursion depth"),
            ("seed=1.5", "could not be converted to Integer (command line)"),
            ("seed=", "(command line)"),
            ("seed=-1", "seed=-1: must lie between 0 and 4"),
            ("seed=???", "missing mandatory value: seed (command line)"),
            ("seed=${nope}", "Interpolation key 'nope' not found (command line)"),
            ("algo=1", "algo is a section"),
            ("rollout.group.x=1", "rollout.group={'x': 1}"),
            ("optim.betas=[1]", "optim.betas=[1]"),
            ("groups.algo=other", "groups are chosen by flags"),
            ("algo.replays=0", "algo.replays=0: must be at least 1 (command line)"),
        ],
    )
    def test_of_the_command_line(self, override: str, says: str) -> None:
        assert says in message(override)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("optim: {lrr: 1}", "no key 'optim.lrr'; did you mean 'optim.lr'?"),
            ("optim: {lr: 0}", "optim.lr=0.0: must be above 0"),
            ("optim: {lr: x}", "optim.lr=x:"),
            ("optim: [1", "in line"),
            ("seed: 1\nseed: 2", "found duplicate key"),
            ("- 1", "must hold keys and values"),
            ("use: method", "no key 'use'"),
            ("\x00", "cannot be read"),
        ],
    )
    def test_of_a_file_name_the_file(self, tmp_path: Path, text: str, says: str) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        said = message(config=file)
        assert says in said
        assert str(file) in said

    def test_a_missing_file(self) -> None:
        assert message(config=Path("nope.yaml")) == "no config file nope.yaml"

    def test_a_section_of_comments_alone_changes_nothing(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text("optim:\n  # lr: 1\n")
        assert run(config=file) == run()

    def test_a_mistake_in_a_shipped_file_names_it(self, parts: Path) -> None:
        (parts / "trainer" / "auto.yaml").write_text("trainer: {update: 3}")
        assert message().endswith("did you mean 'trainer.updates'? (configs/trainer/auto.yaml)")

    def test_names(self) -> None:
        with pytest.raises(PluginError, match=r"no algorithm 'methd'; did you mean 'method'\?"):
            run(algo="methd")
        with pytest.raises(PluginError, match=r"no model 'tinny'; did you mean 'tiny'\?"):
            compose(algo="method", env="world", model="tinny")
        for group in ("algo", "env", "model"):  # too long for a file's name
            with pytest.raises(PluginError, match=r"no \w+ 'xxx"):
                compose(**{"algo": "method", "env": "world", group: 300 * "x"})
        with pytest.raises(PluginError, match=r"'broken' .* cannot be imported"):
            run(algo="broken")
        with pytest.raises(PluginError, match="Config of algorithm 'bad'"):
            run(algo="bad")
        with pytest.raises(ConfigError, match=r"choose an environment: --env NAME \(have: world\)"):
            compose(algo="method")
        with pytest.raises(ConfigError, match="choose an algorithm: --algo NAME"):
            compose(env="world")

    def test_a_plugins_own_check_becomes_a_config_error(self) -> None:
        assert message("algo.clip=2", algo="other") == "algo.clip is too large"


BOUNDS = [
    ("model.dtype", ["bfloat16"], ["half"]),
    ("trainer.accelerator", ["cpu"], ["cpuu"]),
    ("trainer.strategy", ["ddp"], ["dpp"]),
    ("trainer.updates", [1], [0]),
    ("trainer.devices", [1], [0]),
    ("trainer.minibatches", [1], [0]),
    ("trainer.micro_batches", [1], [0]),
    ("trainer.threads", [0], [-1]),
    ("optim.lr", [1e-9], [0, -1, "nan"]),
    ("optim.betas", ["[0,0.99]"], ["[0,1]", "[-1,0]"]),
    ("optim.weight_decay", [0], [-1]),
    ("optim.clip", [0], [-1]),
    ("rollout.tasks", [1], [0]),
    ("rollout.group", [1], [0]),
    ("rollout.max_new_tokens", [1], [0]),
    ("rollout.max_skill_tokens", [1], [0]),
    ("rollout.context", [1], [0]),
    ("rollout.live", [1], [0]),
    ("rollout.temperature", [0.1], [0]),
    ("rollout.max_error_frac", [0, 1], [-0.1, 1.1]),
    ("eval.episodes", [0], [-1]),
    ("eval.every", [0], [-1]),
    ("eval.val_episodes", [1], [0]),
    ("eval.temperature", [0], [-0.1]),
    ("checkpoint.every", [1], [0]),
    ("checkpoint.keep", [1], [0]),
    ("log.groups", [0], [-1]),
    ("seed", [0, 2**32 - 1], [-1, 2**32]),
]


@pytest.mark.parametrize(("key", "good", "bad"), BOUNDS)
def test_bounds(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        run(f"{key}={value}")
    for value in bad:
        assert message(f"{key}={value}").startswith(f"{key}=")


def test_bounds_hold_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tasks=0: must be at least 1"):
        RolloutSection(tasks=0)
