"""Proposals and draft distributions to bytes and back.

A draft distribution travels as sparse integers: q(token) = weight / total, so that both sides hold the
same numbers exactly. The draft first processes, truncates and quantises, and only then draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError

_MAX_WEIGHT = 65535


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution on few tokens. ids: [m] uint32, distinct. weights: [m] uint16, at least 1."""

    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def quantised(cls, ids: np.ndarray, probabilities: np.ndarray) -> SparseDistribution:
        """Weights max(1, round(65535 q / max q)) for the tokens with positive probability.

        ids: [m] integers; probabilities: [m] float64, in any scale.
        """
        positive = probabilities > 0
        ids, probabilities = ids[positive], probabilities[positive]
        weights = np.maximum(1, np.rint(_MAX_WEIGHT * (probabilities / probabilities.max())))
        return cls(ids.astype(np.uint32), weights.astype(np.uint16))

    @classmethod
    def one_hot(cls, token: int) -> SparseDistribution:
        return cls(np.array([token], dtype=np.uint32), np.ones(1, dtype=np.uint16))

    @property
    def total(self) -> int:
        return int(self.weights.sum(dtype=np.uint64))

    @property
    def probabilities(self) -> np.ndarray:
        """[m] float64, in the order of ids."""
        return self.weights.astype(np.float64) / self.total

    def probability(self, token: int) -> float:
        return float(self.weights[self.ids == token].sum(dtype=np.uint64)) / self.total

    def token_at(self, value: int) -> int:
        """The token whose share of [0, total) holds the integer `value`."""
        cumulated = np.cumsum(self.weights, dtype=np.uint64)
        return int(self.ids[np.searchsorted(cumulated, np.uint64(value), side="right")])

    def to_proto(self) -> common_pb2.DraftDistribution:
        return common_pb2.DraftDistribution(
            token_ids=self.ids.astype("<u4").tobytes(), weights=self.weights.astype("<u2").tobytes()
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """The content of a proposal: a chain of tokens, each with the distribution it was drawn from.

    distributions: one for each token, None for one-hot.
    """

    token_ids: tuple[int, ...]
    distributions: tuple[SparseDistribution | None, ...]

    def __post_init__(self) -> None:
        if len(self.distributions) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.distributions)} distributions")

    @classmethod
    def certain(cls, token_ids: Sequence[int]) -> Draft:
        """Tokens without distributions: each counts as one-hot, and only ids travel."""
        return cls(tuple(token_ids), (None,) * len(token_ids))

    def encode(self, seal: int) -> bytes:
        """A serialised ProposalBody; `seal` says under which parameters and prefix it was drawn."""
        rows = self.distributions if any(q is not None for q in self.distributions) else ()
        return common_pb2.ProposalBody(
            token_ids=self.token_ids,
            distributions=[q.to_proto() if q else common_pb2.DraftDistribution() for q in rows],
            seal=seal,
        ).SerializeToString()

    @classmethod
    def decode(cls, body: bytes, seal: int, vocabulary_size: int) -> tuple[Draft, int]:
        """The draft, and how many of its tokens count as one-hot although a distribution was meant.

        Distributions that are broken, or sealed for other parameters or tokens, become None (one-hot):
        exact, only slower. Ids outside the vocabulary raise InvalidRequestError.
        """
        try:
            message = common_pb2.ProposalBody.FromString(body)
        except DecodeError as error:
            raise InvalidRequestError.of("proposal.body", body[:16], "a serialised ProposalBody") from error
        for token in message.token_ids:
            if token >= vocabulary_size:
                raise InvalidRequestError.of("proposal.token_ids", token, f"an id below {vocabulary_size}")
        if message.parents:
            raise InvalidRequestError.of("proposal.parents", list(message.parents), "a chain (no parents)")
        rows = list(message.distributions)
        if not rows:
            return cls.certain(message.token_ids), 0
        sealed = message.seal == seal and len(rows) == len(message.token_ids)
        distributions = [
            _distribution(row, token, vocabulary_size) if sealed else None
            for row, token in zip(rows, message.token_ids, strict=False)
        ]
        distributions += [None] * (len(message.token_ids) - len(distributions))
        wanted = sum(1 for row in rows if row.token_ids) if sealed else len(message.token_ids)
        kept = sum(1 for q in distributions if q is not None)
        return cls(tuple(message.token_ids), tuple(distributions[: len(message.token_ids)])), wanted - kept


def _distribution(
    row: common_pb2.DraftDistribution, token: int, vocabulary_size: int
) -> SparseDistribution | None:
    """A row as it was sent, or None when it isn't a distribution that `token` can have been drawn from."""
    if not row.token_ids or len(row.token_ids) % 4 or len(row.weights) * 2 != len(row.token_ids):
        return None
    ids = np.frombuffer(row.token_ids, dtype="<u4")
    weights = np.frombuffer(row.weights, dtype="<u2")
    valid = (
        weights.min() >= 1
        and ids.max() < vocabulary_size
        and len(np.unique(ids)) == len(ids)
        and bool((ids == token).any())
    )
    return SparseDistribution(ids, weights) if valid else None
