"""Log-probabilities of a token and of the most probable ones beside it."""

from __future__ import annotations

from dataclasses import dataclass

from protos.v1 import common_pb2

#: Ids with their log-probabilities: the most probable first, ties by id, none of probability 0.
TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of a token's probabilities at its position.

    raw: under the model's own distribution (temperature 1, no other parameter). processed: under the
    distribution that the token was drawn from. top_raw, top_processed: the most probable ones of each.
    """

    raw: float
    processed: float
    top_raw: TopLogprobs
    top_processed: TopLogprobs

    def to_proto(self) -> common_pb2.Logprobs:
        return common_pb2.Logprobs(
            raw=self.raw,
            processed=self.processed,
            top_raw=_to_proto(self.top_raw),
            top_processed=_to_proto(self.top_processed),
        )


def _to_proto(top: TopLogprobs) -> list[common_pb2.TokenLogprob]:
    return [common_pb2.TokenLogprob(id=token, logprob=logprob) for token, logprob in top]
