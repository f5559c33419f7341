"""EAGLE drafts: a small network that goes on from the target's own hidden states (see draft_worker/eagle)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

import torch

from draft_worker.drafters.base import PREFETCH, Kind, Loading, positive
from draft_worker.drawing import DraftCounterNoise, ranking, runners_up
from draft_worker.eagle import DEMO, trees
from draft_worker.eagle.loading import load_eagle
from draft_worker.eagle.model import EagleFeed, EagleLM
from draft_worker.eagle.network import EagleConfig
from draft_worker.eagle.state import EagleState, Row
from draft_worker.eagle.trees import Growth, Round
from draft_worker.eagle.vocabulary import DraftVocabulary
from protos.v1 import common_pb2, draft_pb2
from splitspec.engine.blocks import BlockPool
from splitspec.engine.scheduler import Pass, Steps
from splitspec.errors import InvalidRequestError, OutOfSyncError
from splitspec.models import resolve_model
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

#: Where to draft and how many tokens, to how.
Grow: TypeAlias = Callable[[Round, int], Growth]


class EagleDrafter:
    """Proposes from the target's features (2401.15077, 2503.01840).

    Committed rows are fed with the target's features and stay. Draft rows read the network's own outputs.
    They stay until features come, which are better for what is accepted: so a text that goes on by draft
    tokens and one more can be drafted on before the target has its features. Of others nothing is proposed.
    """

    def __init__(self, model: EagleLM, vocabulary: DraftVocabulary, name: str, grow: Grow) -> None:
        request = common_pb2.FeatureRequest(layers=model.config.feature_layers, dtype="bfloat16")
        self.info = draft_pb2.DrafterInfo(
            name=name, kind="eagle", model=model.info, features=request, modes=PREFETCH
        )
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
            state.features = known if state.num_featured >= state.features_start else None
        return state.num_featured
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
        num_tokens = min(num_draft_tokens, self._model.info.max_context - len(token_ids))
        base = _assumed(state, token_ids)
        if num_tokens < 1 or (base not in state.rows and base[:-1] not in state.rows):
            return Draft.certain(())
        yield from self._feed_drafted(state, [base])
        growth = self._grow(Round(drawing.rule, len(token_ids), self._vocabulary.noise(noise)), num_tokens)
        return self._vocabulary.draft((yield from self._draft(state, base, token_ids, drawing, growth)))

    def guess(
        self,
        state: EagleState,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, EagleState]]]]:
        """See PrefetchDrafter. If features have come since the draft, its rows are fed again behind them."""
        yield from self._feed_committed(state, token_ids)
        base = _assumed(state, token_ids)
        if base not in state.rows:
            return []
        places = [place for place, count in enumerate(counts) if count]
        paths = [draft.paths[place] for place in places]
        needed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        for depth in range(1, max(map(len, needed), default=0) + 1):
            yield from self._feed_drafted(state, [base + path for path in needed if len(path) == depth])
        rows = ProcessedRows(
            torch.stack([state.rows[base + path].logits for path in paths]),
            ranking(self._vocabulary.drawing(drawing)),
            self._to_draft(token_ids),
            [self._to_draft(path) for path in paths],
        )
        known = self._vocabulary.noise(noise)
        guesses: list[list[tuple[int, EagleState]]] = [[] for _ in counts]
        for row, (place, path) in enumerate(zip(places, paths, strict=True)):
            children = self._to_draft([draft.token_ids[node] for node in draft.children[place]])
            position = len(token_ids) + len(path)
            tokens = runners_up(drawing.rule, rows, row, position, counts[place], children, known)
            guesses[place] = [(token, state.fork()) for token in self._vocabulary.to_target(tokens)]
        return guesses

    def rest(self, state: EagleState) -> None:
        state.drop_drafted()
        state.kv.rest()

    def free(self, state: EagleState) -> None:
        state.kv.free()

    def held_tokens(self, state: EagleState) -> int:
        return state.num_featured

    def held_bytes(self, state: EagleState) -> int:
        return state.kv.num_bytes

    def _take_over(self, state: EagleState, token_ids: Sequence[int]) -> None:
        """Keep the featured rows that the tokens have in common with those held; drop a text beyond the
        context. The last row is dropped too when its logits are gone: it has to be fed again.
        """
        state.kv.wake()
        text = token_ids[:] if len(token_ids) <= self._model.info.max_context else []
        first, rows = (text[0] if text else None), text[1:]
        if first != state.first_token:
            state.begin(self._model.new_kv(state.tenant, first), first)
        kept = common_prefix(state.kv.token_ids[: state.num_featured], rows)
        if kept < state.num_featured or not kept:
            state.truncate(kept)
        if not kept:
            state.kv.adopt(rows[:-1])
            state.num_featured = state.kv.length
        elif kept == len(rows) and () not in state.rows:
            state.truncate(kept - 1)

    def _feed_committed(self, state: EagleState, token_ids: Sequence[int]) -> Steps[None]:
        """Feed the rows that features have come for, in place of those that were fed without.

        They wait until that has succeeded: a job may be left in the middle of it.
        """
        self._take_over(state, token_ids)
        held = state.num_featured
        if state.features is None or held < state.features_start:
            state.features = None
            return
        features, rows = state.features[held - state.features_start :], token_ids[held + 1 :]
        count = min(len(rows), len(features))
        if not count:
            state.features = None
            return
        state.truncate(held)
        feed = EagleFeed(state.kv, rows[:count], 1, features=features[:count])
        logits = yield Pass(self._model, feed)
        state.num_featured, state.features = state.kv.length, None
        if count == len(rows):
            state.rows[()] = Row(state.kv.length - 1, logits[0])
        state.kv.finalise(state.kv.length)

    def _feed_drafted(self, state: EagleState, paths: Sequence[tuple[int, ...]]) -> Steps[None]:
        """Feed the rows of those paths that have none yet. Those of the paths without their last token are
        held.
        """
        lacking = [path for path in paths if path not in state.rows]
        if not lacking:
            return
        feed = EagleFeed(
            state.kv,
            [path[-1] for path in lacking],
            len(lacking),
            paths=[state.lead(path) for path in lacking],
        )
        held = state.kv.length
        logits = yield Pass(self._model, feed)
        state.rows |= {path: Row(held + index, logits[index]) for index, path in enumerate(lacking)}

    def _draft(
        self,
        state: EagleState,
        base: tuple[int, ...],
        token_ids: Sequence[int],
        drawing: Drawing,
        growth: Growth,
    ) -> Steps[Draft]:
        """Let a growth have the rows that it asks for, in the draft's ids. base: the path that it is on."""
        drawing, tokens = ranking(self._vocabulary.drawing(drawing)), self._to_draft(token_ids)
        paths = next(growth)
        while True:
            known = [(*base, *self._vocabulary.to_target(path)) for path in paths]
            yield from self._feed_drafted(state, known)
            logits = torch.stack([state.rows[path].logits for path in known])
            try:
                paths = growth.send(ProcessedRows(logits, drawing, tokens, paths))
            except StopIteration as end:
                draft: Draft = end.value
                return draft

    def _to_draft(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._vocabulary.to_draft(token_ids))


def _assumed(state: EagleState, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens of a text behind those that the featured rows have read."""
    return tuple(token_ids[state.num_featured + 1 :])


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
    """checkpoint: a directory, or "demo" for the demo model's draft. target: the model that the draft was
    trained for; by default under the name that it had then."""
    directory = DEMO if checkpoint == "demo" else Path(checkpoint).expanduser()
    target = target or EagleConfig.load(directory).target.name
    model, vocabulary = load_eagle(directory, checkpoint, resolve_model(target), target, **asdict(loading))
    shape = {} if tree == "chain" else {"depth": depth, "width": width}
    return EagleDrafter(model, vocabulary, name, functools.partial(_TREES[tree], **shape))


KIND = Kind(
    _build,
    has_checkpoint=True,
    options={"target": str, "tree": _tree, "depth": positive, "width": positive},
)
