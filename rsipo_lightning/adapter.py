"""LoRA (package peft): beside each linear layer W of a frozen model a trained scale * B A, added to
what the layer puts out.

B starts at 0, so a model with a new adapter is the model without. The adapter lives in the model,
whose class, names of other parts and methods stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsipo_lightning.config import LoraSection
from rsipo_lightning.errors import ConfigError

NAME = "default"  # peft's
_KEYS = "lora_A", "lora_B"


def check_package(lora: LoraSection) -> None:
    """ConfigError if an adapter is asked for and peft is missing."""
    if lora.rank and find_spec("peft") is None:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: the package peft is missing; "
            "pip install 'rsipo-lightning[lora]'"
        )


def attach(model: PreTrainedModel, lora: LoraSection, seed: int) -> None:
    """Freeze a model and give it an adapter, whose A follows from the seed; nothing if the rank is
    0. Weights of the adapter are float32 and on the model's device.

    ConfigError for targets that are no linear layers, or the head.
    """
    check_package(lora)
    if not lora.rank:
        return
    from peft import LoraConfig, inject_adapter_in_model

    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linear -= {
        name for name in linear if model.get_submodule(name) is model.get_output_embeddings()
    }
    kinds = {name.rpartition(".")[2] for name in linear}
    if unknown := [name for name in lora.targets if name not in kinds]:
        have = ", ".join(sorted(kinds))
        raise ConfigError(f"model.lora.targets: no linear layer '{unknown[0]}' (have: {have})")
    if not kinds:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: {type(model).__name__} has no linear layers"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,  # type: ignore[arg-type]  # a fraction will do
        target_modules=lora.targets or sorted(kinds),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for layer in adapter_layers(model).values():
        for factor in factors(layer):
            factor.data = factor.data.float()  # AdamW loses small updates of others


def adapted(model: nn.Module) -> bool:
    """Whether it has an adapter."""
    return hasattr(model, "peft_config")


def plain_name(name: str) -> str:
    """Of a parameter in the model without the adapter; "" if it is the adapter's."""
    return "" if any(f".{key}." in name for key in _KEYS) else name.replace(".base_layer.", ".")


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that are adapted, by the plain name of their weight."""
    return {f"{name}.weight": m for name, m in model.named_modules() if hasattr(m, "lora_A")}


def factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A [r, in] and B [out, r]."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def merged(layer: Any) -> Tensor:
    """W + scale * B A, reckoned in float32, in the dtype of W."""
    a, b = (x.detach().float() for x in factors(layer))
    weight: Tensor = layer.base_layer.weight.detach()
    scale: float = layer.scaling[NAME]
    return (weight.float() + scale * (b @ a)).to(weight.dtype)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model as it is without its adapter. Not for a backward pass."""
    layers = adapter_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def write_adapter(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    """What ``PeftModel.from_pretrained(base, folder)`` loads; ``state`` are whole weights by their
    names in the model.
    """
    from safetensors.torch import save_file

    config = model.peft_config[NAME]
    config.target_modules = sorted(config.target_modules)  # a set of peft's
    config.save_pretrained(folder)
    named = {f"base_model.model.{name.replace(f'.{NAME}', '')}": x for name, x in state.items()}
    save_file(named, folder / "adapter_model.safetensors")
