"""EAGLE drafts: a small network that goes on from the target's own hidden states (see draft_worker/eagle)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import torch

from draft_worker.drafters.base import Kind, Loading, positive
from draft_worker.drawing import DraftCounterNoise, ranking
from draft_worker.eagle import trees
from draft_worker.eagle.loading import load_eagle
from draft_worker.eagle.model import EagleFeed, EagleLM
from draft_worker.eagle.network import EagleConfig
from draft_worker.eagle.trees import Growth, Round
from draft_worker.eagle.vocabulary import DraftVocabulary
from protos.v1 import common_pb2, draft_pb2
from splitspec.engine.blocks import BlockPool
from splitspec.engine.kv import KV
from splitspec.engine.scheduler import Pass, Steps
from splitspec.errors import InvalidRequestError, OutOfSyncError
from splitspec.models import resolve_model
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

#: Where to draft and how many tokens, to how.
Grow: TypeAlias = Callable[[Round, int], Growth]


class EagleState:
    """One session. kv: a row for each committed token but the first, and draft rows while it drafts.

    tokens: those that were fed last. features: [tokens, layers, hidden size] that have come for them, those
    of token features_start on, and aren't in kv yet. next_logits: [1, draft vocabulary] of the last committed
    row; None when it wasn't the last one fed.
    """

    def __init__(self, kv: KV, tenant: str) -> None:
        self.kv = kv
        self.tenant = tenant
        self.first_token: int | None = None
        self.tokens: Sequence[int] = ()
        self.features: torch.Tensor | None = None
        self.features_start = 0
        self.next_logits: torch.Tensor | None = None

    @property
    def held_features(self) -> int:
        """Tokens, from the first on, whose features were taken."""
        return self.kv.length if self.features is None else self.features_start + len(self.features)


class EagleDrafter:
    """Proposes from the target's features (2401.15077, 2503.01840): nothing before they have come.

    Committed rows are fed with the target's features and stay. Draft rows read the network's own outputs, and
    are rolled back at the end: the target's features of what is accepted are better.
    """

    def __init__(self, model: EagleLM, vocabulary: DraftVocabulary, name: str, grow: Grow) -> None:
        request = common_pb2.FeatureRequest(layers=model.config.feature_layers, dtype="bfloat16")
        self.info = draft_pb2.DrafterInfo(name=name, kind="eagle", model=model.info, features=request)
        self._model = model
        self._vocabulary = vocabulary
        self._grow = grow

    @property
    def pools(self) -> Sequence[BlockPool]:
        return (self._model.pool,)

    def open(self, tenant: str = "") -> EagleState:
        return EagleState(self._model.new_kv(tenant), tenant)

    def feed(self, state: EagleState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter. Nothing goes into the KV here, though what other sessions have left is adopted:
        features come after it, and wait for the next proposal, however many rounds that takes.
        """
        kept = common_prefix(state.tokens, token_ids)
        state.tokens = token_ids[:]
        self._take_over(state, token_ids)
        if state.features is not None:
            known = state.features[: max(0, kept - state.features_start)]
            state.features = known if state.kv.length >= state.features_start else None
        return state.kv.length
        yield  # it is a job, but needs no pass

    def take_features(self, state: EagleState, start: int, features: torch.Tensor) -> None:
        """Features of tokens `start` on: [tokens, layers, hidden size]. Those held already are left out.

        Raises InvalidRequestError for those of another hidden size, which no target of this draft has, and
        OutOfSyncError when some before `start` lack.
        """
        shape, size = list(features.shape), self._model.config.hidden_size
        if shape[-1] != size:
            raise InvalidRequestError.of("propose.features.shape", shape, f"a hidden size of {size}")
        held = state.held_features
        if start > held:
            raise OutOfSyncError(f"features start at token {start}, but the drafter holds those of {held}")
        if state.features is None:
            state.features, state.features_start = features, start
        else:
            state.features = torch.cat([state.features, features[held - start :]])

    def held_features(self, state: EagleState) -> int:
        return state.held_features

    def propose(
        self,
        state: EagleState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """See Drafter. Empty while features lack; a tree has at most num_draft_tokens nodes."""
        yield from self._feed_committed(state, token_ids)
        committed = state.kv.length
        num_tokens = min(num_draft_tokens, self._model.info.max_context - len(token_ids))
        if state.next_logits is None or committed < len(token_ids) - 1 or num_tokens < 1:
            return Draft.certain(())
        round_ = Round(drawing.rule, len(token_ids), self._vocabulary.noise(noise))
        try:
            growth = self._grow(round_, num_tokens)
            draft = yield from self._draft(state, token_ids, drawing, growth)
        finally:
            state.kv.truncate(min(committed, state.kv.length))
        return self._vocabulary.draft(draft)

    def rest(self, state: EagleState) -> None:
        state.kv.rest()

    def free(self, state: EagleState) -> None:
        state.kv.free()

    def held_tokens(self, state: EagleState) -> int:
        return state.kv.length

    def held_bytes(self, state: EagleState) -> int:
        return state.kv.num_bytes

    def _take_over(self, state: EagleState, token_ids: Sequence[int]) -> None:
        """Keep the rows that the committed tokens have in common with those held; drop a text beyond the
        context. The last row is dropped too when its logits are gone: it has to be fed again.
        """
        state.kv.wake()
        text = token_ids[:] if len(token_ids) <= self._model.info.max_context else []
        first, rows = (text[0] if text else None), text[1:]
        if first != state.first_token:
            state.kv.free()
            state.kv, state.first_token = self._model.new_kv(state.tenant, first), first
        kept = common_prefix(state.kv.token_ids, rows)
        if kept < state.kv.length or not kept:
            state.kv.truncate(kept)
            state.next_logits = None
        if not kept:
            state.kv.adopt(rows[:-1])
        elif kept == len(rows) and state.next_logits is None:
            state.kv.truncate(kept - 1)

    def _feed_committed(self, state: EagleState, token_ids: Sequence[int]) -> Steps[None]:
        """Feed the rows that features have come for."""
        self._take_over(state, token_ids)
        features, state.features = state.features, None
        held = state.kv.length
        if features is None or held < state.features_start:
            return
        features, rows = features[held - state.features_start :], token_ids[held + 1 :]
        count = min(len(rows), len(features))
        if not count:
            return
        feed = EagleFeed(state.kv, rows[:count], 1, features=features[:count])
        logits = yield Pass(self._model, feed)
        state.next_logits = logits if count == len(rows) else None
        state.kv.finalise(state.kv.length)

    def _draft(
        self, state: EagleState, token_ids: Sequence[int], drawing: Drawing, growth: Growth
    ) -> Steps[Draft]:
        """Let a growth have the rows that it asks for, in the draft's ids."""
        drawing, tokens = ranking(self._vocabulary.drawing(drawing)), self._vocabulary.to_draft(token_ids)
        logits = state.next_logits
        row_of: dict[trees.Path, int] = {(): state.kv.length - 1}
        paths = next(growth)
        while True:
            assert logits is not None
            try:
                paths = growth.send(ProcessedRows(logits, drawing, tokens, paths))
            except StopIteration as end:
                draft: Draft = end.value
                return draft
            row_of |= {path: state.kv.length + index for index, path in enumerate(paths)}
            feed = EagleFeed(
                state.kv,
                self._vocabulary.to_target([path[-1] for path in paths]),
                len(paths),
                paths=[[row_of[path[:end]] for end in range(len(path))] for path in paths],
            )
            logits = yield Pass(self._model, feed)


_TREES: Mapping[str, Callable[..., Growth]] = {
    "chain": trees.chain,
    "static": trees.fixed_tree,
    "dynamic": trees.dynamic_tree,
    "best": trees.best_tree,
}


def _tree(text: str) -> str:
    if text not in _TREES:
        raise ValueError(f"one of {', '.join(_TREES)}")
    return text


def _build(
    name: str,
    checkpoint: str,
    loading: Loading,
    *,
    target: str = "",
    tree: str = "best",
    depth: int = 4,
    width: int = 4,
) -> EagleDrafter:
    """target: the model that the draft was trained for; by default under the name that it had then."""
    directory = Path(checkpoint).expanduser()
    target = target or EagleConfig.load(directory).target.name
    model, vocabulary = load_eagle(directory, checkpoint, resolve_model(target), target, **asdict(loading))
    shape = {} if tree == "chain" else {"depth": depth, "width": width}
    return EagleDrafter(model, vocabulary, name, functools.partial(_TREES[tree], **shape))


KIND = Kind(
    _build,
    has_checkpoint=True,
    options={"target": str, "tree": _tree, "depth": positive, "width": positive},
)
