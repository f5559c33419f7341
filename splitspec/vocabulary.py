"""The table from ids to tokens, and its hash: two models speak together only over the same table."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from splitspec.errors import ConfigError, HandshakeError


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A model's table from ids to tokens, added tokens included.

    hash: SHA-256 of the table, in hex. size: its largest id plus one, so that every id is below it; rows
    that pad a model's output don't count. tokenizer: never truncates or pads.
    """

    tokenizer: Tokenizer
    hash: str
    size: int

    @classmethod
    def load(cls, directory: Path) -> Vocabulary:
        """The vocabulary of a model directory. Raises ConfigError when its tokenizer.json can't be read."""
        path = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(
                f"{path} can't be read ({error}), expected a tokenizer as the tokenizers library saves it"
            ) from error
        return cls.of(tokenizer)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        return cls(tokenizer, _hash(table), table[-1][0] + 1 if table else 0)


def check_same_vocabulary(
    ours_name: str, ours: Vocabulary, theirs_name: str, their_hash: str, their_size: int
) -> None:
    """Raise HandshakeError, naming both sides, unless the other side has the same table."""
    if ours.hash != their_hash:
        raise HandshakeError(
            f"{ours_name} and {theirs_name} have different vocabularies: "
            f"{ours_name} has {ours.size} ids with hash {ours.hash}, "
            f"{theirs_name} has {their_size} ids with hash {their_hash}; "
            f"expected models with the same table from ids to tokens"
        )


def _hash(table: list[tuple[int, str]]) -> str:
    """Each entry is its id, its token's length in bytes and its token, so that no two tables look alike."""
    digest = hashlib.sha256()
    for index, token in table:
        encoded = token.encode()
        digest.update(struct.pack("<II", index, len(encoded)) + encoded)
    return digest.hexdigest()
