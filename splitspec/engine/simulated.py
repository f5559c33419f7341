"""Simulated models: a Markov table with chosen pass times, so that two cores can play two accelerators.

Everything around the logits is real: KV, blocks, prefixes, batches, the rules. A pass takes as long as it is
told to, nearly all of it asleep. A draft is accepted because of its table and the target's, never by a coin.

The target. Its next token depends on the last one alone. Each row ranks the vocabulary: the next in one cycle
through all tokens, then all others in any order; each rank is half as probable as the one before, but for
the first two, which are nearly equal: 1/3, 1/3, 1/6, 1/12 and so on. Greedy text thus says every token once
before it repeats itself.

A draft of acceptance a has the target's seed. Each row is q = (1 - w) p + w e, all of e on one token j, and
w = (1 - a) / (1 - p(j)). So sum_t min(p, q) = 1 - w (1 - p(j)) = a on every row: the chance that the token
rule accepts (Leviathan et al., 2211.17192, corollary 3.6) at temperature 1 with no other parameter. In a
share a of the rows j is the first rank, so that both argmaxes agree; in the others it is the second, which
overtakes the first: greedy text agrees in a share a of its tokens. Of a vocabulary of more than 64 the wire
carries the likeliest, which are all but 2^-60.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import structlog
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from protos.v1 import common_pb2
from splitspec.engine.batch import Batch
from splitspec.engine.blocks import BlockPool, LayerShape
from splitspec.engine.feed import Feed
from splitspec.engine.paged import BLOCK_SIZE, PagedLM
from splitspec.errors import ConfigError
from splitspec.vocabulary import Vocabulary

log = structlog.get_logger()

MODEL_TYPE = "splitspec_simulated"
#: By how much the first rank is more probable than the second.
_LEAD = 1e-3
#: A draft's row is all on one token where acceptance is that token's probability in the target's, 1/3.
_LEAST_ACCEPTANCE = 0.35
#: Half a million tokens in float32; each takes a key and a value of one element.
_KV_BYTES = 4 * 2**20
_SPIN_S = 0.0002
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """A simulated model: what its config.json says. Raises ConfigError naming the field.

    acceptance: of its tokens by the simulated target of the same vocabulary and seed; 1 for that target.
    pass_ms, position_ms: a pass over n positions, of all sessions together, takes pass_ms + n position_ms.
    """

    vocabulary_size: int = 128
    seed: int = 1
    acceptance: float = 1.0
    pass_ms: float = 0.0
    position_ms: float = 0.0
    max_context: int = 65536

    def __post_init__(self) -> None:
        for name, least, most in (
            ("vocabulary_size", 16, 4096),
            ("seed", 0, 2**32 - 1),
            ("max_context", 2, 2**24),
            ("acceptance", _LEAST_ACCEPTANCE, 1),
            ("pass_ms", 0, 60_000),
            ("position_ms", 0, 60_000),
        ):
            value = getattr(self, name)
            whole = name in ("vocabulary_size", "seed", "max_context")
            if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
                number = "a whole number" if whole else "a number"
                raise ConfigError(
                    f"{name} is {value!r}, expected {number} from {least} to {most}", field=name
                )

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises ConfigError for a file that isn't one of a simulated model, or lacks or adds a key."""
        found = _read_config(directory)
        names = {field.name for field in fields(cls)}
        if found.pop("model_type", None) != MODEL_TYPE or found.keys() != names:
            raise ConfigError(
                f"{directory / 'config.json'} has the keys {', '.join(sorted(found))}, expected the "
                f"model_type {MODEL_TYPE} and {', '.join(sorted(names))}",
                field="model",
            )
        return cls(**found)

    def save(self, directory: Path) -> None:
        """Write the directory of the model; one that is there becomes this one, also while it runs.

        What runs takes acceptance and times from its next pass on, and can't change anything else. Raises
        ConfigError for the directory of another model.
        """
        if (directory / "config.json").exists() and not is_simulated(directory):
            raise ConfigError(
                f"{directory} holds a model, expected a new directory, or one of a simulated model",
                field="directory",
            )
        directory.mkdir(parents=True, exist_ok=True)
        words = models.WordLevel({str(i): i for i in range(self.vocabulary_size)}, unk_token="0")
        tokenizer = Tokenizer(words)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        for name, content in {
            "tokenizer.json": tokenizer.to_str(),
            "tokenizer_config.json": json.dumps({"chat_template": _CHAT_TEMPLATE}),
            "config.json": json.dumps({"model_type": MODEL_TYPE, **asdict(self)}, indent=2),
        }.items():
            unfinished = directory / f"{name}.unfinished"
            unfinished.write_text(content + "\n")
            unfinished.rename(directory / name)

    def pass_s(self, num_positions: int) -> float:
        return (self.pass_ms + self.position_ms * num_positions) / 1e3

    def probabilities(self) -> npt.NDArray[np.float64]:
        """[vocabulary, vocabulary]: of the next token, in the row of the last one."""
        size = self.vocabulary_size
        draw = np.random.default_rng(self.seed)
        cycle = draw.permutation(size)
        ranked = draw.permuted(np.tile(np.arange(size), (size, 1)), axis=1)
        agrees = draw.permutation(size) < round(self.acceptance * size)
        first = (ranked[cycle] == np.roll(cycle, -1)[:, None]).argmax(axis=1)
        ranked[cycle, first] = ranked[cycle, 0]
        ranked[cycle, 0] = np.roll(cycle, -1)

        p = 0.5 ** np.maximum(np.arange(size) - 1.0, 0)
        p[0] += _LEAD
        p /= p.sum()
        table = np.empty((size, size))
        for rows, rank in ((agrees, 0), (~agrees, 1)):
            weight = (1 - self.acceptance) / (1 - p[rank])
            q = (1 - weight) * p
            q[rank] += weight
            table[np.flatnonzero(rows)[:, None], ranked[rows]] = q
        return table


class SimulatedLM(PagedLM):
    """The model of a directory that `SimulatedConfig.save` wrote.

    When its config.json changes, acceptance and times are those of the new one from the next pass on.
    """

    def __init__(self, directory: Path, name: str, dtype: str, *, kv_memory_bytes: int | None = None) -> None:
        """name: what the user calls it. dtype: of the KV, which nobody reads; logits are float32."""
        config = SimulatedConfig.load(directory)
        vocabulary = Vocabulary.load(directory)
        identity = {"vocabulary": vocabulary.hash, "seed": config.seed, "acceptance": config.acceptance}
        info = common_pb2.ModelInfo(
            name=name,
            fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
            dtype=dtype,
            device="cpu",
            vocabulary_hash=vocabulary.hash,
            vocabulary_size=config.vocabulary_size,
            max_context=config.max_context,
            deterministic=True,
        )
        pool = BlockPool(
            [LayerShape(num_kv_heads=1, key_size=1, value_size=1)],
            memory_bytes=_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes,
            block_size=BLOCK_SIZE,
            dtype=getattr(torch, dtype),
            device=torch.device("cpu"),
        )
        super().__init__(info, pool)
        self._directory = directory
        self._version = _version(directory)
        self._take(config)

    def forward_batch(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """See PagedLM. Returns when the time of the pass is over."""
        began = time.perf_counter()
        self._follow_config()
        logits = super().forward_batch(feeds)
        if feeds:
            sleep_until(began + self._config.pass_s(sum(len(feed.token_ids) for feed in feeds)))
        return logits

    def run(self, batch: Batch) -> torch.Tensor:
        """A row is that of its own token, the last on its path, in a chain and in a tree."""
        return torch.from_numpy(self._logits[[batch.token_ids[row] for row in batch.wanted]])

    def _follow_config(self) -> None:
        version = _version(self._directory)
        if version == self._version:
            return
        config = SimulatedConfig.load(self._directory)
        for name in ("vocabulary_size", "seed", "max_context"):
            old, new = getattr(self._config, name), getattr(config, name)
            if old != new:
                raise ConfigError(f"{name} is {new}, expected {old} while the model runs", field=name)
        self._version = version
        self._take(config)
        log.info("simulated model changed", directory=str(self._directory), **asdict(config))

    def _take(self, config: SimulatedConfig) -> None:
        self._config = config
        self._logits = np.log(config.probabilities()).astype(np.float32)


def is_simulated(directory: Path) -> bool:
    """Whether a model directory is a simulated model's. Raises ConfigError when config.json can't be read."""
    return _read_config(directory).get("model_type") == MODEL_TYPE


def sleep_until(due_s: float) -> None:
    """Return when time.perf_counter() says so. Spins for the last moment: who sleeps wakes up late."""
    rest_s = due_s - time.perf_counter() - _SPIN_S
    if rest_s > 0:
        time.sleep(rest_s)
    while time.perf_counter() < due_s:
        pass


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}), expected a JSON object", field="model") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, expected a JSON object", field="model")
    return found


def _version(directory: Path) -> tuple[int, int]:
    """Of config.json. A file that takes its place has another inode, should the clock stand still."""
    stat = (directory / "config.json").stat()
    return stat.st_mtime_ns, stat.st_ino
