"""Answers that a tenant's earlier requests were given, to look for matches in."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from draft_worker.automaton import Match, SuffixAutomaton
from splitspec.types import Drawing, Rule

#: Matches are looked for up to this length: a longer one would let no more be proposed.
_LONGEST = 32
#: Parts that all answers are kept in: the fewer, the less to look through, and the more is let go of at once.
_NUM_BOOKS = 4


class Book:
    """Some answers of one tenant, and the seeds that they were drawn with."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.seeds: set[int] = set()
        self._num_answers = 0
        self._automaton = SuffixAutomaton()

    def __len__(self) -> int:
        return len(self._automaton.tokens)

    def add(self, token_ids: Sequence[int], seed: int) -> None:
        self._num_answers += 1
        # No token, and never the same: no match and no proposal reaches from one answer into the next.
        self._automaton.extend([*token_ids, -self._num_answers])
        self.seeds.add(seed)

    def find(self, token_ids: Sequence[int]) -> Match:
        """The longest suffix of a session that occurs in an answer."""
        return self._automaton.find(token_ids[-_LONGEST:])

    def continued(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens that followed a match that ended there, in its answer."""
        followed = self._automaton.tokens[end : end + count]
        return list(itertools.takewhile(lambda token: token >= 0, followed))


class PastAnswers:
    """Of all tenants together at most `max_tokens`; the books that were not written to for longest go first.

    Used from the scheduler's thread only. About 600 bytes a token.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        #: In the order of their last answer.
        self._books: dict[Book, None] = {}
        self._by_tenant: defaultdict[str, list[Book]] = defaultdict(list)

    def __len__(self) -> int:
        return self._num_tokens

    def add(self, tenant: str, token_ids: Sequence[int], seed: int) -> None:
        """Keep an answer; of a very long one its last tokens."""
        most = self._max_tokens // _NUM_BOOKS
        kept = token_ids[-(most - 1) :]
        if not kept:
            return
        books = self._by_tenant[tenant]
        if not books or len(books[-1]) + len(kept) >= most:
            books.append(Book(tenant))
        book = books[-1]
        self._num_tokens -= len(book)
        book.add(kept, seed)
        self._num_tokens += len(book)
        self._books.pop(book, None)
        self._books[book] = None
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._books)))

    def books(self, tenant: str, drawing: Drawing) -> list[Book]:
        """Those that a request may propose from, the latest first.

        Where the draft decides which noise counts, an answer that was drawn with the request's own seed is
        not independent of what the request will draw, and must not be proposed from. Greedy choices have no
        noise, and under shared noise the tokens are the same whatever is proposed.
        """
        books = self._by_tenant.get(tenant, [])[::-1]
        if drawing.rule in (Rule.TOKEN, Rule.BLOCK):
            return [book for book in books if drawing.seed not in book.seeds]
        return books

    def _drop(self, book: Book) -> None:
        del self._books[book]
        self._num_tokens -= len(book)
        books = self._by_tenant[book.tenant]
        books.remove(book)
        if not books:
            del self._by_tenant[book.tenant]
