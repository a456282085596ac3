"""How ranks come together, and the one DeepSpeed ZeRO-3 strategy, for CPU (gloo) and GPU (nccl)."""

from __future__ import annotations

import copy
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import distributed, nn

from rsipo_lightning import ranks
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.sharding import deepspeed_for

# One rank's episodes may take that much longer than another's. Not what ends ranks when one fails.
PATIENCE = timedelta(hours=6)


def connect(config: RunConfig, kind: str) -> None:
    """Join the ranks of the run, for devices of this kind (cpu or cuda); before all else that they
    do together. Raises ConfigError where their number is not what the config says.
    """
    t = config.trainer
    if not t.zero3 and t.ranks == ranks.count(1) == 1:
        return
    if not ranks.started():
        raise ConfigError(
            f"--trainer {config.groups['trainer']} runs in processes of its own: start it with "
            "rsipo-fit or torchrun"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", t.devices))
    if (local, ranks.count(t.ranks)) != (t.devices, t.ranks):
        raise ConfigError(
            f"trainer.devices={t.devices} trainer.nodes={t.nodes}: the launcher has started "
            f"{local} ranks on this node, {ranks.count(t.ranks)} in all"
        )
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Dictionaries and numbers of Python go by gloo on both.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=PATIENCE)
    if t.zero3:
        deepspeed_for(kind).init_distributed(backend, verbose=False)


def environment() -> LightningEnvironment | None:
    """For Lightning: what says which rank this is; None for torchrun, which it asks by itself. It
    would ask the cluster's scheduler too, which does not know the ranks of ``ranks.launch``.
    """
    return None if TorchElasticEnvironment.detect() else LightningEnvironment()


def disconnect() -> None:
    """Leave, once all is done."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def check_zero3(config: RunConfig, kind: str) -> None:
    """ConfigError for what ZeRO-3 cannot do here."""
    t = config.trainer
    if not t.zero3:
        return
    for package in ("deepspeed", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(
                f"trainer.strategy=zero3: the package {package} is missing; "
                "pip install 'rsipo-lightning[zero3]'"
            )
    for key in ("offload_optimizer", "offload_parameters"):
        if getattr(t, key) and kind == "cpu":
            raise ConfigError(f"trainer.{key}=true moves memory of a GPU to the CPU; there is none")


class _AsLoaded(DeepSpeedPrecision):
    """Weights have their dtype, and nothing else is cast to it: log-probs stay float32."""

    def __init__(self) -> None:
        super().__init__("32-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data

    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()


class Zero3Strategy(DeepSpeedStrategy):
    """Lightning's, for CPUs too. Ranks have been connected before, and the model holds shares."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(
            config=copy.deepcopy(config),
            logging_level=logging.ERROR,
            precision_plugin=_AsLoaded(),
            exclude_frozen_parameters=True,  # the model without an adapter is where it came from
        )

    @property
    def root_device(self) -> torch.device:
        """DeepSpeed asks for an index on CPUs as well."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """Without the check for GPUs."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """``connect`` has done the rest."""
        reset_seed()
        self.set_world_ranks()

    def setup(self, trainer: L.Trainer) -> None:
        """From here on shares are fetched in a forward; the first one checks the model."""
        super().setup(trainer)
        module: Any = self.lightning_module
        module.policy.check_head()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """One per micro-batch; the last one of an update is a step, whose norm is recorded."""
        engine = self.deepspeed_engine
        before = engine.global_steps
        done = super().optimizer_step(*args, **kwargs)
        if engine.global_steps > before:
            # DeepSpeed leaves out a step whose norm is no number, and keeps the norm before it.
            optimizer: Any = self.optimizers[0]
            norm = float("nan") if optimizer.overflow else float(engine.get_global_grad_norm())
            module: Any = self.lightning_module
            module.stepped(norm, optimizer)
        return done

    def teardown(self) -> None:
        """Shares stay where they are: the policy is still to be written."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def loss_scale(strategy: Any, micro_batches: int, world: int) -> int:
    """What a loss is multiplied with so that the step is that of the sum over micro-batches and
    ranks, which Lightning and DeepSpeed average; DeepSpeed averages over micro-batches once more.
    """
    twice = strategy.handles_gradient_accumulation
    return micro_batches * (micro_batches if twice else 1) * world
