"""RSIPO and the methods it is compared with, as plugin algorithms of one Lightning trainer.

>>> from rsipo_lightning import compose, fit
>>> fit(compose(algo="rsipo", env="search", overrides=["seed=1"]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsipo_lightning.build import evaluate, fit
    from rsipo_lightning.composing import compose

__version__ = "0.1.0"
__all__ = ["compose", "evaluate", "fit"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the package itself imports neither torch nor omegaconf."""
    if name not in __all__:
        raise AttributeError(f"module 'rsipo_lightning' has no attribute '{name}'")
    module = "composing" if name == "compose" else "build"
    return getattr(import_module(f"rsipo_lightning.{module}"), name)
