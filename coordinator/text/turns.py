"""A conversation's next turn as ids, behind those that its session holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Encoding

from coordinator.text.template import ChatMessage, Message
from splitspec.errors import InvalidRequestError
from splitspec.tokens import common_prefix

#: Stands for an answer where its place is looked for; a template that changes letters or cuts text shows it.
_MARK = "This marks the Answer"
_STAND_IN = (Message("user", "question"),)


class Tokenizing(Protocol):
    """What turns ask of `TextCodec`."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encoding(self, text: str) -> Encoding: ...

    def encode_more(self, text: str) -> list[int]: ...

    def special_text(self, token_id: int) -> str: ...


@dataclass(frozen=True)
class Conversation:
    """What a session has said: messages up to its last answer, which begins behind `answer_start` tokens."""

    messages: tuple[Message, ...]
    answer_start: int


@dataclass(frozen=True)
class Prompt:
    """What a request puts into its session: `token_ids`, behind the first `start` tokens, which stay.

    messages: the whole conversation up to the answer that follows; None for text that isn't a conversation.
    """

    start: int
    token_ids: list[int]
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class _Seam:
    """Where a turn is put behind an answer. kept: tokens of the session before it. position: characters of
    the whole text before it. end: the id of the session's last token, when the text has it before them."""

    kept: int
    position: int
    end: int | None = None


@dataclass(frozen=True)
class Turns:
    """Puts messages behind answers. render: a conversation as the model's template has it."""

    codec: Tokenizing
    render: Callable[[Sequence[ChatMessage]], str]

    def after(
        self,
        conversation: Conversation,
        messages: Sequence[ChatMessage],
        before: Sequence[int],
        ends: frozenset[int],
    ) -> Prompt:
        """Messages behind a conversation: the ids of all of it, but with answers as they were generated.

        A template that doesn't keep earlier text as it was gets the ids of all text anew; what they have in
        common with the session's ids `before` stays. ends: ids that end an answer.
        """
        answer_ids = before[conversation.answer_start :]
        end = answer_ids[-1] if answer_ids and answer_ids[-1] in ends else None
        answer = self.codec.decode(answer_ids if end is None else answer_ids[:-1])
        said = (*conversation.messages, Message("assistant", answer), *map(Message.of, messages))
        whole = self.render(said)
        tail = self._tail(said, len(conversation.messages), whole)
        if tail is None:
            ids = self.codec.encoding(whole).ids
        else:
            seam = self._seam(whole, tail, len(before), end)
            ids = [*before[: seam.kept], *self._behind(whole, seam)]
        start = max(0, min(common_prefix(ids, before), len(ids) - 1))
        return Prompt(start, ids[start:], said)

    def after_text(self, messages: Sequence[ChatMessage], end: int | None) -> list[int]:
        """The ids of messages behind text that isn't known to be a conversation, as if it were one.

        end: the text's last id, when that may end an answer. Raises InvalidRequestError when the template
        doesn't keep answers, so that it can't tell what comes behind one.
        """
        whole = self.render([*_STAND_IN, Message("assistant", _MARK), *messages])
        _, found, tail = whole.partition(_MARK)
        if not found:
            roles = [message.role for message in messages]
            expected = "a new session: this one holds other text, which the model's template can't continue"
            raise InvalidRequestError.of("chat.messages", roles, expected)
        return self._behind(whole, self._seam(whole, tail, 0, end))

    def _tail(self, said: Sequence[Message], index: int, whole: str) -> str | None:
        """What the whole text has behind the answer, message `index` of it.

        None when the text before isn't the one that the answer was generated behind, or the answer another.
        """
        marked = self.render([*said[:index], Message("assistant", _MARK), *said[index + 1 :]])
        head, found, tail = marked.partition(_MARK)
        if not found or not whole.startswith(head) or not whole.endswith(tail):
            return None
        answer = whole[len(head) : max(len(head), len(whole) - len(tail))]
        same = head.rstrip() == self.render(said[:index]).rstrip()
        return tail if same and answer.strip() == said[index].content.strip() else None

    def _seam(self, whole: str, tail: str, length: int, end: int | None) -> _Seam:
        """Behind the session's `length` tokens. White space before the end of an answer doesn't count."""
        position = len(whole) - len(tail)
        if end is None:
            return _Seam(length, position)
        marked = tail.lstrip()
        if marked.startswith(self.codec.special_text(end)):
            return _Seam(length, len(whole) - len(marked), end)
        return _Seam(length - 1, position)  # the template ends answers otherwise than the model did

    def _behind(self, whole: str, seam: _Seam) -> list[int]:
        """The ids of the text behind the seam, as they are within the whole if a token begins there."""
        encoding = self.codec.encoding(whole)
        position = seam.position
        for i, (begin, stop) in enumerate(encoding.offsets):
            if seam.end is not None and encoding.ids[i] == seam.end and begin <= position < stop:
                return encoding.ids[i + 1 :]
            if seam.end is None and begin >= position:
                return encoding.ids[i:]
            if seam.end is None and stop > position:
                break
        if seam.end is not None:
            position += len(self.codec.special_text(seam.end))
        return self.codec.encode_more(whole[position:])
