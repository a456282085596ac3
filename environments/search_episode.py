"""One episode of search: what a response asks for, and what the policy is shown for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rsipo_lightning.environments.answers import exact_match, lenient_match
from rsipo_lightning.environments.retriever import Passage
from rsipo_lightning.environments.templates import inert
from rsipo_lightning.environments.wording import Wording
from rsipo_lightning.errors import EnvironmentFault
from rsipo_lightning.protocols import StepResult
from rsipo_lightning.types import Stop, Task

if TYPE_CHECKING:
    from rsipo_lightning.environments.search import SearchConfig

LENIENT = "lenient_match"  # measure of an episode: its answer is right in the lenient sense

_TAG = re.compile(r"</?(?:search|answer|think|information)>")
_FORMS = {
    ("<search>", "</search>"): "search",
    ("<answer>", "</answer>"): "answer",
    ("<think>", "</think>", "<search>", "</search>"): "search",
    ("<think>", "</think>", "<answer>", "</answer>"): "answer",
}


class Action(NamedTuple):
    """What a response says: ``kind`` "search" or "answer", or "" and the reason in ``why``."""

    kind: str
    text: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"<{self.kind}>{self.text}</{self.kind}>" if self.kind else ""


def parse(response: str, think: bool) -> Action:
    """The one action of a response; ``think`` says whether a thought must precede it.

    Both kinds, repeated, nested, unclosed or empty blocks and a block that only the environment may
    write make it invalid. Text outside the blocks is ignored.
    """
    tags = list(_TAG.finditer(response))
    names = tuple(tag.group() for tag in tags)
    kind = _FORMS.get(names, "")
    if not kind:
        if any("information" in name for name in names):
            return Action("", why="only the search engine writes information blocks")
        blocks = [name for name in names if name in ("<search>", "<answer>")]
        why = "more than one action" if len(blocks) > 1 else "no complete action"
        return Action("", why=why)
    if think and len(tags) < 4:
        return Action("", why="no thought")
    text = " ".join(response[tags[-2].end() : tags[-1].start()].split())
    return Action(kind, text) if text else Action("", why=f"the {kind} is empty")


def cut(text: str, tokens: int) -> str:
    """The start of a text that takes about ``tokens`` tokens, so 96 words for 128.

    Environments know no tokenizer. A word counts as 4/3 of a token, a long one (or a sentence of a
    script without spaces) as a token for each 6 bytes.
    """
    room = float(tokens)
    kept: list[str] = []
    for word in text.split():
        cost = max(4 / 3, len(word.encode()) / 6)
        if cost > room + 1e-6:
            start = word.encode()[: int(room * 6)].decode(errors="ignore") if cost > tokens else ""
            return " ".join([*kept, start + "..."])
        kept.append(word)
        room -= cost
    return " ".join(kept)


class SearchEpisode:
    """One live episode. ``retrieve`` gives the passages of each query."""

    def __init__(
        self,
        config: SearchConfig,
        wording: Wording,
        retrieve: Callable[[Sequence[str]], list[list[Passage]]],
    ) -> None:
        self._config, self._wording, self._retrieve = config, wording, retrieve
        self._task: Task | None = None
        self._steps: list[str] = []  # what was done and shown, a line of the history for each turn

    def reset(self, task: Task) -> str:
        """The first user message: template and question, a function of the task and the config."""
        self._task, self._steps = task, []
        return self._wording.opening.format(
            question=inert(task.payload["question"]), max_steps=self._config.max_steps
        )

    def step(self, response: str) -> StepResult:
        """See the protocol."""
        action = self.plan(response)
        return self.apply(action, self._retrieve([action.text])[0] if self.runs(action) else [])

    def close(self) -> None:
        """End the episode."""
        self._task = None

    def plan(self, response: str) -> Action:
        """What ``response`` asks for, without doing it. After the end: EnvironmentFault."""
        if self._task is None:
            raise EnvironmentFault(
                "search: step() after the end of the episode; call reset(task) first"
            )
        return parse(response, self._wording.think)

    def runs(self, action: Action) -> bool:
        """Whether the action needs passages: a search, unless no turn is left to use them."""
        return action.kind == "search" and len(self._steps) + 1 < self._config.max_steps

    def apply(self, action: Action, passages: Sequence[Passage]) -> StepResult:
        """Take the step that :meth:`plan` understood with what the retriever found for it."""
        assert self._task is not None
        task, wording = self._task, self._wording
        if action.kind == "answer":
            self.close()
            answers = task.payload["answers"]
            won = exact_match(action.text, answers)
            lenient = {LENIENT: float(lenient_match(action.text, answers))}
            return StepResult(str(action), "", float(won), won, stop=Stop.DONE, measures=lenient)
        valid = bool(action.kind)
        if len(self._steps) + 1 >= self._config.max_steps:
            self.close()
            return StepResult(
                str(action),
                wording.last.format(),
                valid=valid,
                stop=Stop.MAX_TURNS,
                measures={LENIENT: 0.0},
            )
        seen = self._block(passages) if valid else wording.invalid.format(why=action.why)
        done = str(action._replace(text=inert(action.text)))
        self._steps.append(
            wording.step.format(step=len(self._steps) + 1, action=done, observation=seen)
        )
        counts = {"taken": len(self._steps), "max_steps": self._config.max_steps}
        if self._config.context == "append":
            return StepResult(
                str(action), wording.next.format(observation=seen, **counts), valid=valid
            )
        prompt = wording.window.format(
            question=inert(task.payload["question"]),
            history="\n".join(self._steps[-self._config.history :]),
            **counts,
        )
        return StepResult(str(action), seen, valid=valid, prompt=prompt)

    def _block(self, passages: Sequence[Passage]) -> str:
        """What a search shows; always closed, whatever the passages hold."""
        lines = []
        for i, passage in enumerate(passages, 1):
            title = inert(passage.title)
            text = inert(cut(passage.text, self._config.passage_tokens))
            if self._config.prompt == "full":
                lines.append(f"Doc {i}(Title: {title}) {text}")
            else:  # short: a title that its text repeats is left out
                # A word behind a space and one at the start of a line are two tokens to most
                # tokenizers; a policy that must learn to copy gets one of them everywhere.
                lines.append(f" {text}" if title in text else f" {title}: {text}")
        return "\n".join(
            ("<information>", *(lines or [self._wording.empty.format()]), "</information>")
        )
