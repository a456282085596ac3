"""An engine that answers from a function of the prompt's text: for tests and docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from rsipo_lightning.codec import Codec
from rsipo_lightning.types import Completion, Prompt


class ScriptedEngine:
    """``respond(prompt, text) -> response``; log-probs are 0."""

    own = True  # it has no weights

    def __init__(self, codec: Codec, respond: Callable[[Prompt, str], str]) -> None:
        self.codec, self.respond = codec, respond
        self.policy_version = 0
        self.calls: list[list[Prompt]] = []

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Answer each prompt."""
        self.calls.append(list(prompts))
        return [self._complete(p, self.respond(p, self.codec.decode(p.ids))) for p in prompts]

    def _complete(self, prompt: Prompt, text: str) -> Completion:
        ids = tuple(self.codec.encode(text))[: prompt.max_new_tokens]
        return Completion(
            ids, (0.0,) * len(ids), text, len(ids) == prompt.max_new_tokens, self.policy_version
        )

    def sync_weights(
        self, weights: Iterable[tuple[str, Tensor]] | Iterator[tuple[str, Tensor]], version: int
    ) -> None:
        """Raise the version."""
        self.policy_version = version

    def rest(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to free."""
