"""A smaller causal language model as drafter; its KV is kept from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from draft_worker.drafters.base import PREFETCH, Kind, Loading
from draft_worker.drawing import DraftCounterNoise, draw, ranking, runners_up
from protos.v1 import draft_pb2
from splitspec.engine.backends import load_model
from splitspec.engine.feed import PIECE, Feed
from splitspec.engine.kv import KV
from splitspec.engine.paged import PagedLM
from splitspec.engine.scheduler import Pass, Steps
from splitspec.models import resolve_model
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import common_prefix
from splitspec.types import Drawing, Mode
from splitspec.wire import Draft, SparseDistribution

_MODES = [Mode.PIPELINED.value, *PREFETCH]


class ModelState:
    """One session: its KV, drafted tokens included.

    next_logits: [1, vocabulary] for the token after the last one held; None after a rewind.
    """

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.next_logits: torch.Tensor | None = None


class ModelDrafter:
    """Draws from a model, token by token (Leviathan et al., 2211.17192, section 2.1)."""

    def __init__(self, model: PagedLM, name: str, kind: str = "model") -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind=kind, model=model.info, modes=_MODES)
        self.pools = (model.pool,)
        self._model = model

    def open(self, tenant: str = "") -> ModelState:
        return ModelState(self._model.new_kv(tenant))

    def feed(self, state: ModelState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter. A text beyond the model's context is let go of: it can't draft for it."""
        state.kv.wake()
        if len(token_ids) > self._model.info.max_context:
            self._rewind(state, 0)
            return 0
        self._rewind(state, common_prefix(state.kv.token_ids, token_ids))
        if not state.kv.length:
            state.next_logits = None  # the pool may have taken the KV of a job that was left while it waited
            state.kv.adopt(token_ids, PIECE)
        held = state.kv.length
        if held < len(token_ids):
            yield from self._append(state, token_ids[held:])
        state.kv.finalise(len(token_ids))
        return held

    def propose(
        self,
        state: ModelState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """See Drafter. Shorter than asked where the model's context ends, empty on no tokens."""
        yield from self.feed(state, token_ids)
        # The last draft token is never fed, so a proposal reaches one token beyond the context.
        room = self._model.info.max_context + 1 - len(token_ids)
        count = min(num_draft_tokens, room) if token_ids else 0
        drafted: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for index in range(count):
            if index:
                yield from self._append(state, drafted[-1:])
            rows = ProcessedRows((yield from self._next_logits(state)), drawing, token_ids, [drafted])
            token, q = draw(drawing.rule, rows, 0, index, len(token_ids) + index, noise)
            drafted.append(token)
            distributions.append(q)
        return Draft(tuple(drafted), tuple(distributions))

    def guess(
        self,
        state: ModelState,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, ModelState]]]]:
        """See PrefetchDrafter: one pass over the draft's K + 1 places. Nothing where the context ends."""
        base, fed = len(token_ids), [token_ids[-1], *draft.token_ids]
        if base + len(draft.token_ids) > self._model.info.max_context:
            return []
        yield from self.feed(state, token_ids)
        self._rewind(state, base - 1)
        logits = yield Pass(self._model, Feed(state.kv, fed, len(fed)))
        state.next_logits = logits[-1:]
        rows = ProcessedRows(logits, ranking(drawing), token_ids, draft.paths)
        guesses = []
        for place, count in enumerate(counts):
            own = draft.token_ids[place : place + 1]
            tokens = runners_up(drawing.rule, rows, place, base + place, count, own, noise)
            guesses.append([(token, ModelState(state.kv.fork())) for token in tokens])
        return guesses

    def rest(self, state: ModelState) -> None:
        state.next_logits = None  # the next request begins with other tokens
        state.kv.rest()

    def free(self, state: ModelState) -> None:
        state.kv.free()

    def held_tokens(self, state: ModelState) -> int:
        return state.kv.length

    def held_bytes(self, state: ModelState) -> int:
        return state.kv.num_bytes

    def _append(self, state: ModelState, token_ids: Sequence[int]) -> Steps[None]:
        state.next_logits = yield Pass(self._model, Feed(state.kv, token_ids, 1))

    def _rewind(self, state: ModelState, length: int) -> None:
        if length < state.kv.length:
            state.kv.truncate(length)
            state.next_logits = None

    def _next_logits(self, state: ModelState) -> Steps[torch.Tensor]:
        """[1, vocabulary]; when all tokens were held already, the last of them is fed again."""
        if state.next_logits is None:
            last = state.kv.token_ids[-1]
            self._rewind(state, state.kv.length - 1)
            yield from self._append(state, [last])
        assert state.next_logits is not None
        return state.next_logits


def _build(name: str, checkpoint: str, loading: Loading) -> ModelDrafter:
    model = load_model(resolve_model(checkpoint), name=checkpoint, **asdict(loading))
    return ModelDrafter(model, name)


KIND = Kind(_build, has_checkpoint=True, options={})
