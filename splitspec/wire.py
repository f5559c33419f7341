"""Proposals and draft distributions to bytes and back.

A draft distribution travels as sparse integers: q(token) = weight / total, so that both sides hold the
same numbers exactly. The draft first processes, truncates and quantises, and only then draws.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError
from splitspec.types import Sampling

_MAX_WEIGHT = 65535


def seal(sampling: Sampling, vocabulary_hash: str, prefix_hash: int) -> int:
    """64-bit hash of what draft distributions were drawn under; another seal means another q.

    BLAKE2b with 8 bytes over temperature and top-p as little-endian float64, top-k and prefix hash as
    uint64, and the vocabulary hash as text.
    """
    fixed = struct.pack("<ddQQ", sampling.temperature, sampling.top_p, sampling.top_k, prefix_hash)
    digest = hashlib.blake2b(fixed + vocabulary_hash.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution on few tokens. ids: [m] uint32, distinct. weights: [m] uint16, at least 1."""

    ids: np.ndarray
    weights: np.ndarray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseDistribution):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.weights, other.weights)

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

        A distribution that is broken becomes None (one-hot): exact, only slower. All do when the body is
        sealed for other parameters or tokens, or has more or fewer distributions than tokens.
        Ids outside the vocabulary raise InvalidRequestError.
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
        tokens, rows = tuple(message.token_ids), message.distributions
        if not rows:
            return cls.certain(tokens), 0
        if message.seal != seal or len(rows) != len(tokens):
            return cls.certain(tokens), len(tokens)
        distributions = tuple(
            _distribution(row, token, vocabulary_size) for row, token in zip(rows, tokens, strict=True)
        )
        meant = sum(1 for row in rows if row.token_ids or row.weights)
        return cls(tokens, distributions), meant - sum(1 for q in distributions if q is not None)


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
