"""Tokens per second of each mode, as formulas: what a service without any overhead would do.

Sources: the tokens of a round, Leviathan et al. (2211.17192, equation 1); pipelined, the setting of PEARL
(2408.11850); prefetch, that of SSD (2603.03251). All of them take acceptance to be independent from token to
token, and the prefetch form hits to be so too. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode


@dataclass(frozen=True, slots=True)
class Site:
    """Where a session runs. One of n positions: a pass of the target takes v0 + v1 n.

    acceptance: a, of a draft token that is reached, 0 to 1. draft_ms: d, of one drafted token.
    round_trip_ms: R, of the leg to the draft and the leg to the target together. hit_rate: h, of prefetched
    outcomes. branch_ms: d_B, of a draft step over all branches at once; None for that of one.
    """

    acceptance: float
    draft_ms: float
    pass_ms: float
    position_ms: float
    round_trip_ms: float
    hit_rate: float = 0.0
    branch_ms: float | None = None

    def verify_ms(self, num_positions: int) -> float:
        """v(n)."""
        return self.pass_ms + self.position_ms * num_positions

    def prepare_ms(self, k: int) -> float:
        """T_pre = (K + 1) d_B: of continuations for all outcomes of a proposal of K."""
        return (k + 1) * (self.draft_ms if self.branch_ms is None else self.branch_ms)


def tokens_per_round(acceptance: float, k: int) -> float:
    """E(K) = (1 - a^(K+1)) / (1 - a): those accepted of K, and one more."""
    if acceptance == 1:
        return float(k + 1)
    return float((1 - acceptance ** (k + 1)) / (1 - acceptance))


def plain(site: Site) -> float:
    """1 / v(1): the target runs ahead, so that no token waits for the network."""
    return 1e3 / site.verify_ms(1)


def sequential(site: Site, k: int) -> float:
    """E(K) / (K d + R + v(K+1))."""
    return 1e3 * tokens_per_round(site.acceptance, k) / sequential_ms(site, k)


def sequential_ms(site: Site, k: int) -> float:
    """A round: K d + R + v(K+1)."""
    return k * site.draft_ms + site.round_trip_ms + site.verify_ms(k + 1)


def pipelined(site: Site, k: int) -> float:
    """[1/(1-a)] / [R + v(K) + K d + (K/rho) a^K/(1-a^K)], rho = min(1/d, K/v(K)).

    From one rejection to the next: the pipeline fills once, and then blocks of K go through at the rate of
    the slower side, a^K/(1-a^K) of them on average.
    """
    a, verify_ms = site.acceptance, site.verify_ms(k)
    block_ms = max(k * site.draft_ms, verify_ms)
    if a == 1:
        return 1e3 * k / block_ms
    filling_ms = site.round_trip_ms + verify_ms + k * site.draft_ms
    return float(1e3 / (1 - a) / (filling_ms + block_ms * a**k / (1 - a**k)))


def prefetch_pull(site: Site, k: int) -> float:
    """E(K) / (h T_hit + (1-h) (R + v + K d)) with T_hit = max(R + v, T_pre): a hit hides the draft."""
    return _prefetch(site, k, max(site.round_trip_ms + site.verify_ms(k + 1), site.prepare_ms(k)))


def prefetch_push(site: Site, k: int) -> float:
    """The same with T_hit = max(v, R + T_pre): branches travel ahead, so that a hit hides R too."""
    return _prefetch(site, k, max(site.verify_ms(k + 1), site.round_trip_ms + site.prepare_ms(k)))


def _prefetch(site: Site, k: int, hit_ms: float) -> float:
    h = site.hit_rate
    round_ms = h * hit_ms + (1 - h) * sequential_ms(site, k)
    return 1e3 * tokens_per_round(site.acceptance, k) / round_ms


def tokens_per_s(mode: Mode, site: Site, k: int) -> float:
    """The form of a mode; plain for any K."""
    forms = {
        Mode.SEQUENTIAL: sequential,
        Mode.PIPELINED: pipelined,
        Mode.PREFETCH_PULL: prefetch_pull,
        Mode.PREFETCH_PUSH: prefetch_push,
    }
    return plain(site) if mode is Mode.PLAIN else forms[mode](site, k)


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, its K (0 for plain) and what its form gives."""

    mode: Mode
    k: int
    tokens_per_s: float


def best(mode: Mode, site: Site, most: int = MAX_NUM_DRAFT_TOKENS) -> Choice:
    """The mode with its best K, up to `most`."""
    return max(_choices(mode, site, most), key=lambda choice: choice.tokens_per_s)


def top(site: Site, count: int, modes: tuple[Mode, ...] = tuple(Mode)) -> list[Choice]:
    """The best choices of all, best first."""
    every = [choice for mode in modes for choice in _choices(mode, site, MAX_NUM_DRAFT_TOKENS)]
    return sorted(every, key=lambda choice: -choice.tokens_per_s)[:count]


def _choices(mode: Mode, site: Site, most: int) -> Iterator[Choice]:
    for k in (0,) if mode is Mode.PLAIN else range(1, most + 1):
        yield Choice(mode, k, tokens_per_s(mode, site, k))


def bound(site: Site, k: int) -> float:
    """What no mode with one chain can pass: min((K+1) / v(K+1), 1/d, 1/((1-a)(1-h)(R+v+d))).

    The target's work, the draft's, and a miss at each rejection that wasn't prepared for.
    """
    verify_ms = site.verify_ms(k + 1)
    bounds = [(k + 1) / verify_ms, 1 / site.draft_ms]
    misses = (1 - site.acceptance) * (1 - site.hit_rate)
    if misses:
        bounds.append(1 / (misses * (site.round_trip_ms + verify_ms + site.draft_ms)))
    return 1e3 * min(bounds)


def longest_round_trip_ms(site: Site, k: int) -> float:
    """Where sequential stops paying: R < E(K) v(1) - K d - v(K+1)."""
    worth_ms = tokens_per_round(site.acceptance, k) * site.verify_ms(1)
    return worth_ms - k * site.draft_ms - site.verify_ms(k + 1)
