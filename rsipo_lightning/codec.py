"""Chat template <-> token ids. Conversations only grow: nothing sampled is encoded again.

The template is rendered with marker strings as message contents and cut at the markers. Its own
pieces are encoded with special tokens; contents are encoded as plain text, so that data which
spells ``<|im_end|>`` ends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rsipo_lightning.errors import ConfigError
from rsipo_lightning.protocols import TASK_LINE
from rsipo_lightning.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_LINE = re.compile(r"\n?[ \t]*Now it's your turn")
ANCHORS = (
    "'Your task is to:', 'Your current task is:', 'Your task is:', 'Your question:' "
    "or 'Now it's your turn'"
)


class Codec:
    """Token ids of conversations with one tokenizer.

    ``Codec(tok).start("Your question: who?\\nAnswer.")`` gives the ids of
    ``<|user|>Your question: who?`` + ``\\nAnswer.<|end|><|assistant|>`` and, as anchor, the length
    of the first part.

    ``stop_ids``: end of text and end of turn. ``prefix_stable``: whether the template's own
    rendering of a longer conversation starts with that of a shorter one; ours always does, so that
    templates which strip old thoughts do no harm.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError without a chat template, or if it does not keep the contents."""
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self._name} has no chat template; "
                "use an instruct model or add chat_template.jinja"
            )
        self._pieces: dict[tuple[str, ...], tuple[str, ...]] = {}
        head, tail = self._cut(("user",))
        glue = self._cut(("user", "assistant", "user"))[2]
        self._head, self._tail = self._control(head), self._control(tail)
        self._glue = self._control(glue)  # end of the policy's turn, start of the next message
        ends = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        stops = {i for i in self._glue if i in ends and glue.lstrip().startswith(ends[i])}
        stops |= {tokenizer.eos_token_id} - {None}
        self.stop_ids: tuple[int, ...] = tuple(sorted(stops))
        self.prefix_stable = self._probe(tail)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a turn of the policy; none if the tokenizer has no such token."""
        return tuple([i for i in self._glue if i in self.stop_ids] or self.stop_ids)[:1]

    def start(self, user: str, skill: str = "") -> tuple[tuple[int, ...], int]:
        """Ids up to where the policy begins its turn, and the anchor: the index of a skill section.

        The section goes right after the task line of ``user``, else before ``Now it's your turn``;
        raises ConfigError if there is neither. All other ids are the same with and without a skill.
        """
        if line := TASK_LINE.search(user):
            cut = line.end()
        elif turn := TURN_LINE.search(user):
            cut = turn.start()
        else:
            raise ConfigError(
                f"no place for a skill in the first message: it needs a line with {ANCHORS}"
            )
        before = self._head + self.encode(user[:cut])
        ids = before + self.encode(user[cut:]) + self._tail
        anchor = len(before)
        return (self.inject(ids, anchor, skill) if skill else ids), anchor

    def inject(self, ids: Sequence[int], anchor: int, skill: str) -> tuple[int, ...]:
        """Put the skill section at the anchor.

        ``inject(*start(user), skill) == start(user, skill)[0]``
        """
        return (*ids[:anchor], *self.section_ids(skill), *ids[anchor:])

    def section_ids(self, skill: str) -> tuple[int, ...]:
        """Ids of the lines that show a skill."""
        return self.encode(self.section(skill))

    @staticmethod
    def section(skill: str) -> str:
        """The lines that show a skill to the policy (methods.md 3.2)."""
        return f"\nEpisode-Level Skill\nFollow this advice where it helps:\n[{skill}]"

    def step_section_ids(self, skill: str) -> tuple[int, ...]:
        """Ids of the lines that show a skill of one decision (methods.md 3.2)."""
        return self.encode(f"\nCritical-Step Skill\nFor this decision only:\n[{skill}]")

    @property
    def tail(self) -> int:
        """Tokens between the end of a user message and the first that the policy samples."""
        return len(self._tail)

    def extend(self, ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Append the end of the policy's turn, the next message and the start of the next turn.

        ``ids`` is the last prompt with the sampled ids behind it; it is a prefix of the result, bit
        for bit. An end of turn that was sampled is not repeated.
        """
        last = ids[-1]
        said = last in self.stop_ids and last in self._glue
        glue = self._glue[self._glue.index(last) + 1 :] if said else self._glue
        return (*ids, *glue, *self.encode(observation), *self._tail)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of messages and the start of the policy's turn, for prompts that are no episode."""
        pieces = self._cut(tuple(m.role for m in messages))
        ids = self._control(pieces[0])
        for message, piece in zip(messages, pieces[1:], strict=True):
            ids += self.encode(message.content) + self._control(piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only for a list of lists
        return text

    @property
    def _name(self) -> str:
        return f"the tokenizer of {self.tokenizer.name_or_path or 'this model'}"

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a content: names of special tokens are plain text in it."""
        return tuple(
            self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )

    def _control(self, text: str) -> tuple[int, ...]:
        """Ids of a piece of the template."""
        return tuple(
            self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
        )

    def _render(self, messages: Sequence[Message]) -> str:
        chat: list[dict[str, Any]] = [m._asdict() for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # templates raise what they like, e.g. for an unknown role
            roles = ", ".join(m.role for m in messages)
            raise ConfigError(
                f"the chat template of {self._name} refuses the roles {roles}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _cut(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """Text of the template before, between and behind the contents of messages."""
        if roles not in self._pieces:
            marks = [f"QzContent{i}zQ" for i in range(len(roles))]
            messages = [Message(*pair) for pair in zip(roles, marks, strict=True)]
            pieces, rest = [], self._render(messages)
            for mark in marks:
                piece, found, rest = rest.partition(mark)
                if not found or mark in rest:
                    raise ConfigError(
                        f"the chat template of {self._name} drops, moves or repeats contents; "
                        "set a plain chat_template in its tokenizer_config.json"
                    )
                pieces.append(piece)
            self._pieces[roles] = (*pieces, rest)
        return self._pieces[roles]

    def _probe(self, tail: str) -> bool:
        """Does a longer conversation keep what a policy with thoughts was shown and said?"""
        said = Message("assistant", "<think>\nhm\n</think>\n\nlook")
        talk = [Message("user", "a"), said, Message("user", "b")]
        first = self._render(talk[:1])
        return first.endswith(tail) and self._render(talk).startswith(first + said.content)
