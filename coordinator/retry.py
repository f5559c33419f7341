"""What a session's record notes of its last request, for a retry and for the conversation's next turn."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass

from coordinator.text import Conversation, Message
from protos.v1 import coordinator_pb2
from splitspec.errors import InvalidRequestError


@dataclass(frozen=True)
class Note:
    """One request on a session.

    digest: of the request's content. seed: of its randomness. start: committed tokens before its prompt.
    messages: the session's conversation up to this request's answer; None when its text isn't one.
    num_prompt: tokens of the prompt. room: tokens that the target's context leaves behind them.
    eos_token_ids: the target's. finished: the last message once the request has ended, else empty.
    """

    request_id: str
    digest: str
    seed: int
    start: int
    num_prompt: int
    room: int
    eos_token_ids: tuple[int, ...]
    finished: str = ""
    messages: tuple[Message, ...] | None = None

    @classmethod
    def decode(cls, stored: bytes) -> Note | None:
        if not stored:
            return None
        fields = json.loads(stored)
        messages = fields.pop("messages", None)
        said = None if messages is None else tuple(Message(**message) for message in messages)
        return cls(**fields, messages=said)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def of_same_request(self, request_id: str, digest: str) -> bool:
        """Whether this is the note of the request. Raises InvalidRequestError for another under its id."""
        if self.request_id != request_id:
            return False
        if self.digest != digest:
            raise InvalidRequestError.of("request_id", request_id, "a new id: another request had this one")
        return True

    @property
    def prompt_end(self) -> int:
        """Committed tokens before the request's output."""
        return self.start + self.num_prompt

    @property
    def conversation(self) -> Conversation | None:
        """What the session has said, with this request's answer as the last."""
        return None if self.messages is None else Conversation(self.messages, self.prompt_end)

    @property
    def last_message(self) -> coordinator_pb2.Finished | None:
        if not self.finished:
            return None
        return coordinator_pb2.Finished.FromString(base64.b64decode(self.finished))


def digest_of(message: coordinator_pb2.GenerateRequest) -> str:
    """Hash of what a request asks for, wherever it resumes and whatever its client has seen."""
    content = coordinator_pb2.GenerateRequest()
    content.CopyFrom(message)
    content.ClearField("resume_offset")
    content.ClearField("session_length")
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()


def encode_finished(finished: coordinator_pb2.Finished) -> str:
    return base64.b64encode(finished.SerializeToString()).decode()
