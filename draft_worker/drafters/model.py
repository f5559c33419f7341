"""A smaller causal language model as drafter; its KV is kept from round to round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_worker.drafters.base import Kind, common_prefix
from draft_worker.drawing import DraftCounterNoise, draw
from protos.v1 import draft_pb2
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.kv import KV
from splitspec.models import resolve_model
from splitspec.sampling.rows import ProcessedRows
from splitspec.types import Drawing
from splitspec.wire import Draft, SparseDistribution


class ModelState:
    """One session: its KV, and the tokens that the KV belongs to, drafted ones included.

    next_logits: [1, vocabulary] for the token after the last one held; None after a rewind.
    """

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.tokens: list[int] = []
        self.next_logits: torch.Tensor | None = None


class ModelDrafter:
    """Draws from a model, token by token (Leviathan et al., 2211.17192, section 2.1)."""

    def __init__(self, model: CausalLM, name: str, kind: str = "model") -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind=kind, model=model.info)
        self._model = model

    def open(self) -> ModelState:
        return ModelState(self._model.new_kv())

    def feed(self, state: ModelState, token_ids: Sequence[int]) -> None:
        """See Drafter. A text beyond the model's context is let go of: it can't draft for it."""
        if len(token_ids) > self._model.info.max_context:
            self.close(state)
            return
        self._rewind(state, common_prefix(state.tokens, token_ids))
        if len(state.tokens) < len(token_ids):
            self._append(state, token_ids[len(state.tokens) :])

    def propose(
        self,
        state: ModelState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Draft:
        """See Drafter. Shorter than asked where the model's context ends, empty on no tokens."""
        self.feed(state, token_ids)
        # The last draft token is never fed, so a proposal reaches one token beyond the context.
        room = self._model.info.max_context + 1 - len(token_ids)
        count = min(num_draft_tokens, room) if token_ids else 0
        drafted: list[int] = []
        distributions: list[SparseDistribution | None] = []
        for index in range(count):
            if index:
                self._append(state, drafted[-1:])
            rows = ProcessedRows(self._next_logits(state), drawing, token_ids, [drafted])
            token, q = draw(drawing.rule, rows, 0, index, len(token_ids) + index, noise)
            drafted.append(token)
            distributions.append(q)
        return Draft(tuple(drafted), tuple(distributions))

    def held_tokens(self, state: ModelState) -> int:
        return state.kv.length

    def held_bytes(self, state: ModelState) -> int:
        return self._model.kv_bytes(state.kv)

    def close(self, state: ModelState) -> None:
        state.kv = self._model.new_kv()
        state.tokens = []
        state.next_logits = None

    def _append(self, state: ModelState, token_ids: Sequence[int]) -> None:
        state.next_logits = self._model.forward(state.kv, token_ids, 1)
        state.tokens.extend(token_ids)

    def _rewind(self, state: ModelState, length: int) -> None:
        if length < len(state.tokens):
            self._model.truncate(state.kv, length)
            del state.tokens[length:]
            state.next_logits = None

    def _next_logits(self, state: ModelState) -> torch.Tensor:
        """[1, vocabulary]; after a rewind to tokens that were all held, the last of them is fed again."""
        if state.next_logits is None:
            last = state.tokens[-1]
            self._rewind(state, len(state.tokens) - 1)
            self._append(state, [last])
        assert state.next_logits is not None
        return state.next_logits


def _build(name: str, checkpoint: str, *, dtype: str, device: str) -> ModelDrafter:
    model = CausalLM.load(resolve_model(checkpoint), name=checkpoint, dtype=dtype, device=device)
    return ModelDrafter(model, name)


KIND = Kind(_build, has_checkpoint=True, options={})
