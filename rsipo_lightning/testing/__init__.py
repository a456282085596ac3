"""For tests and for authors of plugins: the contracts as checks, and small real parts.

    from rsipo_lightning.testing import check_algorithm, check_environment

    check_algorithm("mine", gamma=0.5)      # a registered name, or the class
    check_environment("my_game")

Each returns None or raises ContractError, which says in a sentence which rule is broken.
"""

from rsipo_lightning.testing.algorithm import check_algorithm, toy_world
from rsipo_lightning.testing.contract import ContractError
from rsipo_lightning.testing.environment import check_environment
from rsipo_lightning.testing.toys import (
    BANK,
    SPECIAL,
    ToyWorld,
    adapted_policy,
    byte_tokenizer,
    gradient,
    make_algorithm,
    random_policy,
    toy_group,
)

__all__ = [
    "BANK",
    "SPECIAL",
    "ContractError",
    "ToyWorld",
    "adapted_policy",
    "byte_tokenizer",
    "check_algorithm",
    "check_environment",
    "gradient",
    "make_algorithm",
    "random_policy",
    "toy_group",
    "toy_world",
]
