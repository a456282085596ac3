"""What the checks of both contracts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

R = TypeVar("R")


class ContractError(AssertionError):
    """A plugin breaks a rule. The message is a sentence: who, where, which rule, what was found."""


class Contract:
    """Rules of one plugin; ``where`` is said in front of each, e.g. the case that is tried."""

    def __init__(self, who: str) -> None:
        self.who, self.where = who, ""

    def require(self, holds: bool, rule: str) -> None:
        """ContractError unless it holds."""
        if not holds:
            raise ContractError(": ".join(filter(None, (self.who, self.where, rule))))

    def call(self, what: str, function: Callable[..., R], *args: Any) -> R:
        """The function's result; an exception of it breaks the rule that it must not raise."""
        try:
            return function(*args)
        except ContractError:
            raise
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            rule = f"{what} raised {type(error).__name__}: {text}"
            raise ContractError(": ".join(filter(None, (self.who, self.where, rule)))) from error


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, tensors bit for bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        )
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)
