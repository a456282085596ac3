"""Models of which each rank holds a share (DeepSpeed ZeRO-3): loaded, copied, read and made whole.

Functions on weights take plain models as well, so that callers need not know which they have.
Imported where DeepSpeed is missing too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsipo_lightning.config import RunConfig
from rsipo_lightning.metrics import rank_of_ranks

BUCKET = 1 << 27  # elements that are gathered at once; a larger parameter is gathered alone


def share(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, flat under ZeRO-3. Changes in place count."""
    held: Tensor = getattr(parameter, "ds_tensor", parameter)
    return held


def sharded(model: nn.Module) -> bool:
    """Whether ranks hold shares of it."""
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def full_weights(model: nn.Module, bucket: int = BUCKET) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter with its name, whole until the next one is asked for; tied ones once.

    Collective under ZeRO-3: every rank must go to the end. No more than ``bucket`` elements (or one
    larger parameter) are whole at a time. Those of a plain model are its own parameters.
    """
    if not sharded(model):
        yield from model.named_parameters()
        return
    import deepspeed

    for named in _buckets(list(model.named_parameters()), bucket):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in named]):
            yield from named


def _buckets(
    named: list[tuple[str, nn.Parameter]], limit: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    filled = 0
    for name, parameter in named:
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, parameter))
        filled += size
    if bucket:
        yield bucket


def full_state(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The whole state dict, on the CPU of rank 0 alone. Collective under ZeRO-3.

    None for a plain model, which has its own.
    """
    if not sharded(model):
        return None
    first = rank_of_ranks()[0] == 0
    state = {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in full_weights(model)
        if first
    }
    kept = model.state_dict().keys()
    return {**state, **{name: b for name, b in model.named_buffers() if name in kept}}


def plain_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A whole model of the same kind, its weights still to be filled."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device(device):
            made: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)
    return made


class Shards:
    """Loads models such that each rank keeps its share only."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        self.config = zero3_config(config, kind)
        self.kind = kind
        self._engines: list[Any] = []  # of frozen copies: they fetch the weights in a forward

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return torch.device(self.kind, int(os.environ["LOCAL_RANK"]) * (self.kind == "cuda"))

    def load(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """What ``make`` returns. ``from_pretrained`` splits each tensor as it reads it; what is
        made otherwise is split afterwards. Collective.
        """
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        alive = HfDeepSpeedConfig(copy.deepcopy(self.config))  # from_pretrained looks for one
        try:
            model = make()
        finally:
            del alive
        if not sharded(model):
            import deepspeed

            deepspeed.zero.Init(module=model, config_dict_or_path=copy.deepcopy(self.config))
        return model

    def frozen(self, model: nn.Module) -> None:
        """Make a model of shares run without an optimizer. Collective."""
        import deepspeed

        config = {k: v for k, v in self.config.items() if k != "gradient_clipping"}
        self._engines.append(deepspeed.initialize(model=model, config=copy.deepcopy(config))[0])


def zero3_config(config: RunConfig, kind: str) -> dict[str, Any]:
    """What DeepSpeed is told; Lightning adds the number of micro-batches."""
    t = config.trainer
    stage: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": kind == "cuda",
    }
    if kind == "cpu":  # small policies: everything is split, and buffers of gigabytes are not made
        stage |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1 << 22}
    if t.offload_optimizer:
        stage["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if t.offload_parameters:
        stage["offload_param"] = {"device": "cpu", "pin_memory": True}
    told: dict[str, Any] = {}
    if config.model.dtype == "bfloat16":  # of the forward; sums, steps and their weights: float32
        told = {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return {
        **told,
        "zero_optimization": stage,
        # torch.optim.AdamW: nothing to compile, and the same steps as elsewhere
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.optim.clip,
        "train_micro_batch_size_per_gpu": 1,  # of no use here, but asked for
    }


def deepspeed_for(kind: str) -> Any:
    """The package, imported such that nothing is compiled."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logging.logger.setLevel("ERROR")  # it warns of torch's own optimizers
    # Its shared-memory collectives would be built for minutes; gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
