"""Proposals and draft distributions to bytes and back.

A draft distribution travels as sparse integers: q(token) = weight / total, so that both sides hold the
same numbers exactly. The draft first processes, truncates and quantises, and only then draws.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError
from splitspec.limits import check_count
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Drawing

_MAX_WEIGHT = 65535


def seal_key(drawing: Drawing, vocabulary_hash: str, prefix_hash: int) -> bytes:
    """What a draft is drawn under: another key means another q. Goes into the seal of its distributions.

    Every parameter that shapes a distribution, where the output begins, the rule, the vocabulary's hash and
    the prefix hash, as JSON with sorted keys and no spaces.
    """
    sampling, output = drawing.sampling, drawing.output
    under = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sorted(sampling.logit_bias.items()),
        "allowed_token_ids": sorted(sampling.allowed_token_ids),
        "banned_token_ids": sorted(sampling.banned_token_ids),
        "output": [output.start, output.min_tokens, sorted(output.ending_token_ids)],
        "rule": drawing.rule.value,
        "vocabulary_hash": vocabulary_hash,
        "prefix_hash": prefix_hash,
    }
    return json.dumps(under, sort_keys=True, separators=(",", ":")).encode()


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

    def without(self, token: int) -> SparseDistribution:
        """What is drawn from when `token` can't come again: integers still, the same on both sides."""
        kept = self.ids != token
        return SparseDistribution(self.ids[kept], self.weights[kept])

    def to_proto(self) -> common_pb2.DraftDistribution:
        return common_pb2.DraftDistribution(
            token_ids=self.ids.astype("<u4").tobytes(), weights=self.weights.astype("<u2").tobytes()
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """The content of a proposal: a chain of tokens, or a tree.

    parents: empty for a chain; for a tree the parent of each token as its index plus one, 0 for the children
    of the committed tokens. A parent comes before its children, and siblings differ.
    distributions: of a chain, the one that each token was drawn from, None for one-hot. Of a tree, entry 0
    is the one that the children of the committed tokens were drawn from, in their order and without
    replacement, and entry i + 1 that of token i's children; None for certain children, and for a leaf.
    """

    token_ids: tuple[int, ...]
    distributions: tuple[SparseDistribution | None, ...]
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.distributions) != self._num_distributions(len(self.token_ids), self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.distributions)} distributions")

    @classmethod
    def certain(cls, token_ids: Sequence[int], parents: Sequence[int] = ()) -> Draft:
        """Tokens without distributions: each counts as one-hot, and only ids travel."""
        rows = cls._num_distributions(len(token_ids), parents)
        return cls(tuple(token_ids), (None,) * rows, tuple(parents))

    def after(self, count: int) -> Draft:
        """A chain without its first `count` tokens."""
        assert not self.parents
        return Draft(self.token_ids[count:], self.distributions[count:])

    @staticmethod
    def _num_distributions(num_tokens: int, parents: Sequence[int]) -> int:
        return num_tokens + 1 if parents else num_tokens

    @property
    def children(self) -> list[list[int]]:
        """[tokens + 1] lists of indices: the children of the committed tokens, then those of each token."""
        children: list[list[int]] = [[] for _ in range(len(self.token_ids) + 1)]
        for node, parent in enumerate(self.parents or range(len(self.token_ids))):
            children[parent].append(node)
        return children

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """[tokens + 1] token ids that lead to each row: none to row 0, those up to token i to row i + 1."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.token_ids, self.parents or range(len(self.token_ids)), strict=True):
            paths.append((*paths[parent], token))
        return paths

    def encode(self, key: bytes) -> bytes:
        """A serialised ProposalBody, sealed with `key` (see `seal_key`)."""
        rows = self.distributions if any(q is not None for q in self.distributions) else ()
        body = common_pb2.ProposalBody(
            token_ids=self.token_ids,
            parents=self.parents,
            distributions=[q.to_proto() if q else common_pb2.DraftDistribution() for q in rows],
        )
        if rows:
            body.seal = _seal(key, body)
        return body.SerializeToString()

    @classmethod
    def decode(cls, body: bytes, key: bytes, vocabulary_size: int) -> tuple[Draft, int, bool]:
        """The draft, how many of its tokens count as one-hot although a distribution was meant, and whether
        that is because of the seal.

        A distribution that is broken becomes None (one-hot): exact, only slower. All do when the body is
        sealed for other parameters or tokens, or has too few or too many distributions. Raises
        InvalidRequestError for ids outside the vocabulary, and for what is neither chain nor tree.
        """
        try:
            message = common_pb2.ProposalBody.FromString(body)
        except DecodeError as error:
            raise InvalidRequestError.of("proposal.body", body[:16], "a serialised ProposalBody") from error
        for field in ("token_ids", "parents"):
            check_count(f"proposal.{field}", getattr(message, field), MAX_NUM_DRAFT_TOKENS)
        tokens, parents = tuple(message.token_ids), tuple(message.parents)
        for token in tokens:
            if token >= vocabulary_size:
                raise InvalidRequestError.of("proposal.token_ids", token, f"an id below {vocabulary_size}")
        if parents and (
            len(parents) != len(tokens)
            or any(parent > node for node, parent in enumerate(parents))
            or len(set(zip(parents, tokens, strict=True))) != len(tokens)
        ):
            expected = "one for each token, at most its own index, and siblings with different tokens"
            raise InvalidRequestError.of("proposal.parents", list(parents), expected)
        certain, rows = cls.certain(tokens, parents), message.distributions
        if not rows:
            return certain, 0, False
        if message.seal != _seal(key, message):
            return certain, len(tokens), True
        if len(rows) != len(certain.distributions):
            return certain, len(tokens), False
        drawn = certain.children if parents else [[node] for node in range(len(tokens))]
        distributions = tuple(
            _distribution(row, [tokens[node] for node in nodes], vocabulary_size)
            for row, nodes in zip(rows, drawn, strict=True)
        )
        broken = sum(
            len(nodes)
            for row, q, nodes in zip(rows, distributions, drawn, strict=True)
            if q is None and (row.token_ids or row.weights)
        )
        return cls(tokens, distributions, parents), broken, False


def _seal(key: bytes, body: common_pb2.ProposalBody) -> int:
    """BLAKE2b with 8 bytes over the key, tokens and parents as uint32, then ids and weights of each row.

    All little-endian; every part is preceded by its length in bytes as uint64.
    """
    parts = [
        key,
        np.array(body.token_ids, "<u4").tobytes(),
        np.array(body.parents, "<u4").tobytes(),
        *(part for row in body.distributions for part in (row.token_ids, row.weights)),
    ]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def _distribution(
    row: common_pb2.DraftDistribution, tokens: Sequence[int], vocabulary_size: int
) -> SparseDistribution | None:
    """A row as it was sent, or None when it isn't a distribution that all of `tokens` can have come from."""
    if not row.token_ids or len(row.token_ids) % 4 or len(row.weights) * 2 != len(row.token_ids):
        return None
    ids = np.frombuffer(row.token_ids, dtype="<u4")
    weights = np.frombuffer(row.weights, dtype="<u2")
    valid = (
        weights.min() >= 1
        and ids.max() < vocabulary_size
        and len(np.unique(ids)) == len(ids)
        and np.isin(tokens, ids).all()
    )
    return SparseDistribution(ids, weights) if valid else None
