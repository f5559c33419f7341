"""Random parameters on the demo model: blocks that are verified, against the library token by token.

Both texts are the same but for near ties: a pass over K+1 tokens rounds otherwise than K+1 passes. A text
that differs has to show that this is all: where it leaves the other, both models gave the same logits up to
float32, and the library's own processors choose our token on ours.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.sampling.randomness import CounterNoise
from splitspec.sampling.rows import ProcessedRows
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.verification.rules import decide
from splitspec.wire import Draft
from tests.drawings import drawing_of
from tests.processors import processed_logits, warped

#: Rounding of float32 in logits of up to about 30.
SAME_LOGITS = 1e-3
MAX_DRAFT = 4
PROMPTS = (
    "The capital of France is",
    "One, two, three, four, five, six, one, two, three,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, a fox met a heron by the river. The fox said",
)


@dataclass
class Text:
    """An output, with the model's own logits that each of its tokens was chosen from."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def append(self, token: int, logits: torch.Tensor) -> None:
        self.token_ids.append(token)
        self.logits.append(logits)


def choice(logits: torch.Tensor, tokens: Sequence[int], drawing: Drawing) -> int:
    """The library's token behind `tokens`; above temperature 0 the noise of the position decides."""
    scores = processed_logits(logits, tokens, drawing.sampling, drawing.output)
    if drawing.sampling.greedy:
        return int(torch.argmax(scores))
    p = warped(scores, drawing.sampling)
    return CounterNoise(drawing.seed, 0).race(len(tokens), p)


class Library:
    """Decoding token by token, many requests on one prompt at a time."""

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        self._model = model
        self._prompt = list(prompt)
        self._cache = DynamicCache(config=model.config)
        # Of the last token a batch has to be fed.
        self._feed(self._cache, [self._prompt[:-1]])

    def decode(self, drawings: Sequence[Drawing], length: int) -> list[Text]:
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(len(drawings))
        texts, last = [Text() for _ in drawings], [self._prompt[-1] for _ in drawings]
        for _ in range(length):
            rows = self._feed(cache, [[token] for token in last])
            for drawing, text, row in zip(drawings, texts, rows, strict=True):
                text.append(choice(row, [*self._prompt, *text.token_ids], drawing), row)
            last = [text.token_ids[-1] for text in texts]
        return texts

    @torch.inference_mode()
    def _feed(self, cache: DynamicCache, token_ids: list[list[int]]) -> torch.Tensor:
        """[requests, vocabulary] logits behind the last token."""
        fed = self._model(input_ids=torch.tensor(token_ids), cache=cache, logits_to_keep=1)
        logits: torch.Tensor = fed.logits[:, -1].float()
        return logits


@dataclass
class Session:
    """A request that our blocks decode. draft_at: what to propose behind so many tokens of the output."""

    kv: KV
    prompt: Sequence[int]
    drawing: Drawing
    draft_at: Callable[[int], Draft]
    text: Text = field(default_factory=Text)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.text.token_ids]

    def feed(self, draft: Draft) -> Feed:
        token_ids = [*self.tokens[self.kv.length :], *draft.token_ids]
        return Feed(self.kv, token_ids, len(draft.token_ids) + 1, draft.parents)

    def verify(self, draft: Draft, logits: torch.Tensor) -> None:
        tokens = self.tokens
        rows = ProcessedRows(logits, self.drawing, tokens, draft.paths)
        noise = CounterNoise(self.drawing.seed, len(self.accepted) + 1)
        outcome = decide(self.drawing.rule, rows, draft, len(tokens), noise)
        if draft.parents:
            self.kv.keep_path(len(tokens) - 1, outcome.path)
        else:
            self.kv.truncate(len(tokens) + outcome.num_accepted)
        visited = [0, *(node + 1 for node in outcome.path)]
        emitted = [*(draft.token_ids[node] for node in outcome.path), outcome.next_token]
        for row, token in zip(visited, emitted, strict=True):
            self.text.append(token, logits[row])
        self.accepted.append(outcome.num_accepted)


def decode(model: CausalLM, sessions: Sequence[Session], length: int) -> None:
    """Verify blocks, many sessions in a pass, until each output has at least `length` tokens."""
    # Behind the prompt's last token a tree has its root.
    model.forward_batch([Feed(session.kv, session.prompt[:-1], 0) for session in sessions])
    while running := [session for session in sessions if len(session.text.token_ids) < length]:
        drafts = [session.draft_at(len(session.text.token_ids)) for session in running]
        feeds = [session.feed(draft) for session, draft in zip(running, drafts, strict=True)]
        blocks = zip(running, drafts, model.forward_batch(feeds), strict=True)
        for session, draft, logits in blocks:
            session.verify(draft, logits)


def likely_ids(library: Library, length: int) -> list[int]:
    """Ids that the model's own texts hold, so that a parameter on one of them changes something."""
    samplings = [Sampling(temperature=0), *(Sampling(seed=seed) for seed in range(7))]
    texts = library.decode([drawing_of(sampling, Rule.SHARED_NOISE) for sampling in samplings], length)
    return sorted({token for text in texts for token in text.token_ids})


def random_drawing(g: np.random.Generator, likely: Sequence[int], start: int, length: int) -> Drawing:
    """A third greedy; each other parameter in two of five requests."""

    def some(count: int) -> list[int]:
        return [int(token) for token in g.choice(likely, count, replace=False)]

    parameters: dict[str, Any] = {
        "top_k": int(g.integers(1, 60)),
        "top_p": float(g.uniform(0.3, 0.99)),
        "min_p": float(g.uniform(0, 0.3)),
        "repetition_penalty": float(g.uniform(0.8, 1.6)),
        "presence_penalty": float(g.uniform(-2, 2)),
        "frequency_penalty": float(g.uniform(-2, 2)),
        # Eighths are numbers of float32.
        "logit_bias": {token: int(g.integers(-80, 40)) / 8 for token in some(6)},
        "allowed_token_ids": frozenset(some(len(likely) * 3 // 4)),
        "banned_token_ids": frozenset(some(4)),
    }
    chosen = {name: value for name, value in parameters.items() if g.random() < 0.4}
    temperature = float(g.choice([0.0, 1.0, g.uniform(0.3, 1.5)]))
    sampling = Sampling(temperature=temperature, seed=int(g.integers(2**63)), **chosen)
    output = Output(start, int(g.integers(length)), frozenset(some(4)))
    return drawing_of(sampling, Rule.SHARED_NOISE, output)


def drafts_of(
    g: np.random.Generator, expected: Sequence[int], likely: Sequence[int]
) -> Callable[[int], Draft]:
    """Up to MAX_DRAFT expected tokens: in chains some are replaced, in trees some have siblings."""

    def chain(right: Sequence[int]) -> Draft:
        return Draft.certain([int(g.choice(likely)) if g.random() < 0.2 else token for token in right])

    def tree(right: Sequence[int]) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        parent = 0
        for token in right:
            siblings = [token, *({int(g.choice(likely))} - {token})]
            g.shuffle(siblings)
            token_ids += siblings
            parents += [parent] * len(siblings)
            parent = len(token_ids) - len(siblings) + siblings.index(token) + 1
        return Draft.certain(token_ids, parents)

    def draft_at(position: int) -> Draft:
        right = expected[position : position + int(g.integers(MAX_DRAFT + 1))]
        return tree(right) if g.random() < 0.5 else chain(right)

    return draft_at


def assert_near_tie(session: Session, theirs: Text, at: int) -> None:
    """The texts differ at an index, and are the same before: by the rounding of the models alone."""
    ours, drawing = session.text, session.drawing
    assert float((ours.logits[at] - theirs.logits[at]).abs().max()) < SAME_LOGITS, drawing
    before = [*session.prompt, *theirs.token_ids[:at]]
    assert choice(ours.logits[at], before, drawing) == ours.token_ids[at], drawing


def compare(demo_model: Path, sets_per_prompt: int, length: int) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    model = CausalLM.load(demo_model, name="demo", dtype="float32", device="cpu")
    library_model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    g = np.random.default_rng(1)
    num_near_ties, texts, accepted = 0, set(), Counter[int]()
    for text in PROMPTS:
        prompt: list[int] = tokenizer.encode(text).ids
        library = Library(library_model, prompt)
        likely = likely_ids(library, length)
        drawings = [random_drawing(g, likely, len(prompt), length) for _ in range(sets_per_prompt)]
        expected = library.decode(drawings, length)
        sessions = [
            Session(model.new_kv(), prompt, drawing, drafts_of(g, theirs.token_ids, likely))
            for drawing, theirs in zip(drawings, expected, strict=True)
        ]
        decode(model, sessions, length)
        for session, theirs in zip(sessions, expected, strict=True):
            session.kv.free()
            accepted.update(session.accepted)
            texts.add(tuple(theirs.token_ids))
            pairs = zip(session.text.token_ids, theirs.token_ids, strict=False)
            at = next((i for i, (our, their) in enumerate(pairs) if our != their), None)
            if at is not None:
                assert_near_tie(session, theirs, at)
                num_near_ties += 1
    num_sets = len(PROMPTS) * sets_per_prompt
    assert num_near_ties <= num_sets / 50
    # The parameters matter, and blocks of each length are there.
    assert len(texts) > num_sets / 2
    assert set(accepted) == set(range(MAX_DRAFT + 1))


@pytest.mark.model
def test_blocks_equal_the_librarys_text(demo_model: Path) -> None:
    compare(demo_model, 25, 8)


@pytest.mark.model
@pytest.mark.full
def test_blocks_equal_the_librarys_longer_texts(demo_model: Path) -> None:
    compare(demo_model, 100, 32)
