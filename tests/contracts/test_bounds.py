"""Negative and absurd numbers: no numeric key of any registered component takes one by accident."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from rsipo_lightning import registry
from rsipo_lightning.composing import SFT, compose, compose_kind
from rsipo_lightning.config import SftSection
from rsipo_lightning.errors import ConfigError

HUGE = 10**30
TAKEN = {("env.world", -1), ("env.world", HUGE)}  # on purpose: any number names a world


def numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{field.name}", value


def keys() -> list[tuple[str, str, str, Any]]:
    """(algorithm, environment, key, absurd value), each key of a shared section once."""
    found = {}
    for algo in registry.names("algorithms"):
        for env in registry.names("environments"):
            for key, default in numbers(compose(algo=algo, env=env)):
                owner = {"algo": algo, "env": env}.get(key.partition(".")[0], "")
                absurd = ["nan", "inf", "-inf", "1e30"] if isinstance(default, float) else [HUGE]
                for value in (-1, *absurd):
                    found[owner, key, value] = (algo, env, key, value)
    return list(found.values())


@pytest.mark.parametrize(("algo", "env", "key", "value"), keys())
def test_a_number_that_makes_no_sense_is_refused(algo: str, env: str, key: str, value: Any) -> None:
    def use() -> None:
        config = compose(algo=algo, env=env, overrides=[f"{key}={value}"])
        if key.startswith("env."):  # checked where the data is opened
            registry.load("environments", env)(config.env, config.seed).close()

    if (key, value) in TAKEN:
        use()
        return
    with pytest.raises(ConfigError) as caught:
        use()
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", dict(numbers(SftSection(), "sft.")))
@pytest.mark.parametrize("value", [-1, HUGE, "nan", "inf"])
def test_nor_does_one_of_stage_1(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_kind(SFT, {"env": "search"}, None, [f"{key}={value}"])
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
