"""A GenerateRequest whose fields were checked and whose defaults were filled in."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, replace

from coordinator.text import TextCodec
from protos.v1 import coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Sampling, Stop


@dataclass(frozen=True)
class Request:
    """What one call of Generate asks for.

    prompt: token ids, at least one. keep: the session outlives the request. sampling.seed is set.
    num_draft_tokens: 0 decodes plainly. drafter: empty for the default one.
    """

    request_id: str
    tenant: str
    session_id: str
    keep: bool
    prompt: tuple[int, ...]
    sampling: Sampling
    stop: Stop
    num_draft_tokens: int
    drafter: str
    one_token_per_chunk: bool

    @classmethod
    def from_proto(
        cls, message: coordinator_pb2.GenerateRequest, settings: CoordinatorSettings, codec: TextCodec
    ) -> Request:
        """Raises InvalidRequestError for the first field that is wrong."""
        sampling = Sampling.from_proto(message.sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        stop = Stop.from_proto(message.stop)
        if stop.max_tokens is not None and stop.max_tokens > settings.max_tokens:
            raise InvalidRequestError.of("stop.max_tokens", stop.max_tokens, f"1 to {settings.max_tokens}")
        speculation = message.speculation
        num_draft_tokens = settings.num_draft_tokens
        if speculation.HasField("num_draft_tokens"):
            num_draft_tokens = speculation.num_draft_tokens
        if num_draft_tokens > MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError.of(
                "speculation.num_draft_tokens", num_draft_tokens, f"0 to {MAX_NUM_DRAFT_TOKENS}"
            )
        if message.resume_offset:
            raise InvalidRequestError.of(
                "resume_offset", message.resume_offset, "0: requests can't be resumed yet"
            )
        return cls(
            request_id=message.request_id or uuid.uuid4().hex,
            tenant=message.tenant,
            session_id=message.session_id or uuid.uuid4().hex,
            keep=bool(message.session_id),
            prompt=_prompt(message, codec),
            sampling=sampling,
            stop=stop,
            num_draft_tokens=0 if speculation.disabled else num_draft_tokens,
            drafter=speculation.drafter,
            one_token_per_chunk=message.one_token_per_chunk,
        )


def _prompt(message: coordinator_pb2.GenerateRequest, codec: TextCodec) -> tuple[int, ...]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError.of("prompt", None, "one of text, chat, token_ids")
    if kind == "token_ids":
        ids = list(message.token_ids.ids)
        wrong = next((token for token in ids if token >= codec.vocabulary.size), None)
        if wrong is not None:
            raise InvalidRequestError.of("token_ids", wrong, f"ids below {codec.vocabulary.size}")
    elif kind == "chat":
        ids = codec.encode_chat(message.chat.messages)
    else:
        ids = codec.encode(message.text)
    if not ids:
        raise InvalidRequestError.of(kind, "", "a prompt of at least one token")
    return tuple(ids)
