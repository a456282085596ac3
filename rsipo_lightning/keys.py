"""Names of the logged values, ``area/name_unit``, in one place. Imports nothing heavy.

The suffix says the unit or the reduction: ``_frac _mean _max _count _s _tokens``. The x-axis is
the update.
"""

from __future__ import annotations

import re
from typing import Final

CATEGORIES: Final = ("procedural", "recovery", "format", "other")  # of skills

SUCCESS: Final = "rollout/success_frac"
VALID_ACTION: Final = "rollout/valid_action_frac"
TURNS: Final = "rollout/turns_mean"
ACTION_TOKENS: Final = "rollout/action_tokens_mean"
ERROR: Final = "rollout/error_frac"
TRUNCATED: Final = "rollout/truncated_frac"
ENV_STEPS: Final = "rollout/env_steps_count"
EPISODES: Final = "rollout/episodes_count"
SCORE: Final = "reward/score_mean"
ZERO_STD: Final = "reward/group_zero_std_frac"

GAIN: Final = "replay/gain_mean"
TREATED_SUCCESS: Final = "replay/treated_success_frac"
CONTROL_SUCCESS: Final = "replay/control_success_frac"
REPLAY_ERROR: Final = "replay/error_frac"
TEACHER_BETTER: Final = "replay/teacher_better_frac"
TEACHER_WORSE: Final = "replay/teacher_worse_frac"
REPLAY_ENV_STEPS: Final = "replay/env_steps_count"
REPLAY_EPISODES: Final = "replay/episodes_count"

SKILL_ANALYSED: Final = "skill/analysed_frac"
SKILL_VALID: Final = "skill/valid_frac"
SKILL_CHARS: Final = "skill/chars_mean"

TRUST: Final = "trust/omega_mean"
LR: Final = "optim/lr"
CPU: Final = "time/cpu_s"  # of this process in rollouts, replays and the update, not evaluations
FORWARDS: Final = "time/forwards_count"  # of policy, reference and teacher, generation left out
FORWARD_TOKENS: Final = "time/forward_tokens"  # that these have run
VERSION: Final = "progress/policy_version"
CHANGED: Final = "engine/changed_count"  # tensors of the policy that the update has changed
IMITATE: Final = "loss/imitate"  # of stage 1
VAL_LOSS: Final = "val/loss"  # of stage 1: the skills of held-out tasks
VAL_SUCCESS: Final = "val/success_frac"
TEST_SUCCESS: Final = "test/success_frac"


def stop(reason: str) -> str:
    """``rollout/stop_max_turns_frac``."""
    return f"rollout/stop_{reason}_frac"


def category(name: str) -> str:
    """``skill/procedural_frac``."""
    return f"skill/{name}_frac"


def category_gain(name: str) -> str:
    """``skill/procedural/gain_mean``."""
    return f"skill/{name}/gain_mean"


def trust_of(task_type: str) -> str:
    """``trust/bridge2/omega_mean``."""
    return f"trust/{_tag(task_type)}/omega_mean"


def by_type(area: str, env: str, task_type: str, name: str = "success_frac") -> str:
    """``rollout/search/hotpotqa/success_frac``; what a tag cannot hold becomes ``_``."""
    return f"{area}/{_tag(env)}/{_tag(task_type)}/{name}"


def macro_success(area: str) -> str:
    """``test/macro_success_frac``: the mean over the task types."""
    return f"{area}/macro_success_frac"


def measure(area: str, name: str) -> str:
    """``rollout/lenient_match_mean``: a further measure that an environment gives its episodes."""
    return f"{area}/{_tag(name)}_mean"


def _tag(text: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", text) or "_"
