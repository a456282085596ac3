"""What scores beside the policy: frozen copies of it. Where an adapter is trained, the reference is
the same model with the adapter off, and a teacher's copy is one of the adapter alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rsipo_lightning.adapter import switched_off
from rsipo_lightning.policy import Policy
from rsipo_lightning.sharding import sharded, share


class AdapterOff(nn.Module):
    """The policy without its adapter: the one that it was before any training. Holds nothing."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = [policy]  # in a list: no part of this module

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """As ``Policy.forward``; the backward pass is not for it."""
        (policy,) = self._policy
        with switched_off(policy.model):
            out: tuple[Tensor, Tensor] = policy(*args)
        return out


class AdapterCopy(nn.Module):
    """The policy with the adapter as it was; holds this rank's shares of the adapter's weights."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = [policy]
        held = [share(p).detach().clone() for p in policy.trained()]
        self.held = nn.ParameterList(held).requires_grad_(False)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """As ``Policy.forward``; the backward pass is not for it."""
        with self._exchanged():
            out: tuple[Tensor, Tensor] = self._policy[0](*args)
        return out

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for held, parameter in zip(self.held, self._policy[0].trained(), strict=True):
            current, kept = share(parameter), held.clone()
            held.copy_(current)
            current.copy_(kept)


def frozen(policy: Policy) -> nn.Module:
    """A copy of the policy as it is now."""
    if policy.adapted:
        return AdapterCopy(policy)
    return copy.deepcopy(policy).requires_grad_(False)


@torch.no_grad()
def follow(copied: nn.Module, policy: Policy, ema: float) -> None:
    """The copy becomes ema * copy + (1 - ema) * policy."""
    for held, current in zip(copied.parameters(), policy.trained(), strict=True):
        share(held).lerp_(share(current), 1 - ema)


def state_of(copied: nn.Module) -> dict[str, Tensor]:
    """The weights of a copy, of its shares those of this rank."""
    if not sharded(copied):
        return copied.state_dict()
    return {name: share(p).detach().cpu().clone() for name, p in copied.named_parameters()}


@torch.no_grad()
def restore(copied: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what ``state_of`` returned."""
    if not sharded(copied):
        copied.load_state_dict(state)
        return
    for name, parameter in copied.named_parameters():
        share(parameter).copy_(state[name])
