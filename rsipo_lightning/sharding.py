"""Models of which each rank holds a share (DeepSpeed ZeRO-3): loaded, copied, read and made whole.

Functions on weights take plain models as well, so that callers need not know which they have.
Imported where DeepSpeed is missing too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rsipo_lightning.adapter import adapted, adapter_layers, factors, merged, plain_name
from rsipo_lightning.config import RunConfig
from rsipo_lightning.metrics import rank_of_ranks

BUCKET = 1 << 27  # elements that are gathered at once; a larger parameter is gathered alone


def share(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, flat under ZeRO-3. Changes in place count.

    Without what pads the last ranks' shares to the length of the others: it may be any number.
    """
    held: Tensor | None = getattr(parameter, "ds_tensor", None)
    if held is None:
        return parameter
    left = int(parameter.ds_numel) - rank_of_ranks()[0] * held.numel()  # type: ignore[attr-defined]
    return held[: max(0, left)]


def sharded(model: nn.Module) -> bool:
    """Whether ranks hold shares of it."""
    return any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def acting_weights(model: nn.Module, bucket: int = BUCKET) -> Iterator[tuple[str, Tensor]]:
    """Each weight with its name, whole until the next one is asked for; tied ones once. Those of
    the plain model that acts like this one: an adapter is merged into the weights beside it, one at
    a time. The others are the model's own parameters.

    Collective under ZeRO-3: every rank must go to the end. No more than ``bucket`` elements (or one
    larger parameter) are whole at a time.
    """
    layers = adapter_layers(model)
    units: list[Unit] = []
    for own, parameter in model.named_parameters():
        if name := plain_name(own):
            more = factors(layers[name]) if name in layers else ()
            units.append((name, (parameter, *more)))
    for name, (parameter, *_) in whole(units, bucket):
        yield name, merged(layers[name]) if name in layers else parameter


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of an adapter, on the CPU. Collective under ZeRO-3."""
    units = [(name, (p,)) for name, p in model.named_parameters() if not plain_name(name)]
    return {name: p.detach().to("cpu", copy=True) for name, (p,) in whole(units)}


Unit = tuple[str, tuple[nn.Parameter, ...]]  # a name, and parameters that are needed together


def whole(units: Sequence[Unit], bucket: int = BUCKET) -> Iterator[Unit]:
    """Each unit while its parameters are whole. Collective under ZeRO-3."""
    if not any(hasattr(parameter, "ds_tensor") for _, own in units for parameter in own):
        yield from units
        return
    import deepspeed

    for part in _buckets(units, bucket):
        with deepspeed.zero.GatheredParameters([p for _, own in part for p in own]):
            yield from part


def _buckets(units: Sequence[Unit], limit: int) -> Iterator[list[Unit]]:
    bucket: list[Unit] = []
    filled = 0
    for name, own in units:
        size = sum(int(getattr(p, "ds_numel", p.numel())) for p in own)
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, own))
        filled += size
    if bucket:
        yield bucket


def full_state(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The whole state dict of the plain model, on the CPU of rank 0 alone. Collective under ZeRO-3.

    None for a plain model, which has its own.
    """
    if not sharded(model) and not adapted(model):
        return None
    first = rank_of_ranks()[0] == 0
    state = {
        name: weight.detach().to("cpu", copy=True)
        for name, weight in acting_weights(model)
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


def local_device(kind: str) -> torch.device:
    """This rank's device of a kind (cpu or cuda)."""
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) * (kind == "cuda"))


class Shards:
    """Loads models such that each rank keeps its share only."""

    def __init__(self, config: RunConfig, kind: str) -> None:
        self.config = zero3_config(config, kind)
        self.kind = kind
        self._engines: list[Any] = []  # of frozen copies: they fetch the weights in a forward

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return local_device(self.kind)

    def load(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """What ``make`` returns. ``from_pretrained`` splits each tensor as it reads it; what is
        made otherwise is split afterwards, as an adapter is. Collective.
        """
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        alive = HfDeepSpeedConfig(copy.deepcopy(self.config))  # from_pretrained looks for one
        try:
            model = make()
        finally:
            del alive
        if new := [p for p in model.parameters() if not hasattr(p, "ds_tensor")]:
            import deepspeed

            for parameter in new:  # an adapter's: DeepSpeed keeps float32 weights beside all
                parameter.data = parameter.data.to(model.dtype)

            deepspeed.zero.Init(module=model, config_dict_or_path=copy.deepcopy(self.config))
        for buffer in model.buffers():  # parameters are there already
            buffer.data = buffer.data.to(self.device)
        return model

    def frozen(self, model: nn.Module) -> None:
        """Make a model of shares run without an optimizer. Collective."""
        import deepspeed

        config = {k: v for k, v in self.config.items() if k != "gradient_clipping"}
        self._engines.append(deepspeed.initialize(model=model, config=copy.deepcopy(config))[0])
        for parameter in model.parameters():  # small ones too are fetched anew: shares may change
            parameter.ds_persist = False  # type: ignore[attr-defined]


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
    if config.model.lora.rank:  # shares of an adapter are exchanged: none may be kept whole
        stage["stage3_param_persistence_threshold"] = 0
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
