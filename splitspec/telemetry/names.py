"""Every span, attribute and metric that the three processes emit. docs/telemetry.md has the same as tables.

Names follow OpenTelemetry's conventions where there is one: `gen_ai.*` and `rpc.*`. Counters of
speculative decoding have none, so they mirror vLLM's (`spec_decode.num_drafts` and so on) under our prefix.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from opentelemetry.trace import SpanKind


class Kind(enum.Enum):
    """What a metric is. COUNTER: a sum that only grows. GAUGE: a level of the moment."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """A key of spans or metric points. Units are in the name or in the description."""

    name: str
    description: str


@dataclass(frozen=True, slots=True, eq=False)
class SpanName:
    """A kind of span. parent: names of the spans it is a child of; empty for the root.

    kind: a client's span waits for another process, a server's works for one.
    kept_when_slow: a slow one is recorded even when its request isn't sampled.
    """

    name: str
    parent: tuple[str, ...]
    description: str
    attributes: tuple[Attribute, ...] = ()
    kind: SpanKind = SpanKind.INTERNAL
    kept_when_slow: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric. unit: in UCUM, as OpenTelemetry writes it. buckets: upper bounds, for histograms."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[Attribute, ...] = ()
    buckets: tuple[float, ...] = ()


# Attributes by convention.
OPERATION = Attribute("gen_ai.operation.name", '"chat" or "text_completion"')
PROVIDER = Attribute("gen_ai.provider.name", '"splitspec"')
MODEL = Attribute("gen_ai.request.model", "target model")
MAX_TOKENS = Attribute("gen_ai.request.max_tokens", "most tokens to generate")
TEMPERATURE = Attribute("gen_ai.request.temperature", "temperature; 0 is greedy")
TOP_P = Attribute("gen_ai.request.top_p", "top-p bound")
TOP_K = Attribute("gen_ai.request.top_k", "top-k bound; 0 keeps all")
CONVERSATION_ID = Attribute("gen_ai.conversation.id", "session id")
FINISH_REASONS = Attribute("gen_ai.response.finish_reasons", "why the output ended, as a list of one")
INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "prompt tokens")
CACHED_TOKENS = Attribute(
    "gen_ai.usage.cache_read.input_tokens", "prompt tokens that were held and not fed again"
)
OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens", "generated tokens")
RPC_SYSTEM = Attribute("rpc.system.name", '"grpc"')
RPC_METHOD = Attribute("rpc.method", "full name of the gRPC method")
RPC_STATUS = Attribute("rpc.response.status_code", "gRPC status, such as OK or CANCELLED")
ERROR_TYPE = Attribute(
    "error.type", 'class of the error that ended it, or "cancelled"; absent when it went well'
)

# Our own attributes.
REQUEST_ID = Attribute("splitspec.request.id", "request id")
EPOCH = Attribute("splitspec.epoch", "epoch of the session")
ROUND = Attribute("splitspec.round", "round of the session")
BASE_LENGTH = Attribute("splitspec.base_length", "committed tokens that it builds on")
RULE = Attribute("splitspec.rule", "verification rule")
DRAFTER = Attribute("splitspec.drafter", "name of the drafter")
ROLE = Attribute("splitspec.role", 'the worker\'s role, "draft" or "target"')
WORKER_ID = Attribute("splitspec.worker.id", "id of the running worker")
NUM_DRAFT_TOKENS = Attribute("splitspec.num_draft_tokens", "proposal length; 0 in a plain round")
NUM_ACCEPTED = Attribute("splitspec.num_accepted", "accepted draft tokens")
NUM_ONE_HOT = Attribute("splitspec.num_one_hot", "draft tokens verified as one-hot")
NEXT_ORIGIN = Attribute(
    "splitspec.next_origin",
    '"correction", "bonus" or "plain"; "held" when it waits for a proposal that follows',
)
NUM_TOKENS = Attribute("splitspec.num_tokens", "tokens that were fed, granted, committed or sent")
MISSED = Attribute("splitspec.missed", "true when no proposal came within the patience")
REPEATED = Attribute("splitspec.repeated", "true for a verdict that had been given before")
STALE = Attribute("splitspec.stale", "true for a message that was dropped as stale")
FEATURE_BYTES = Attribute(
    "splitspec.feature_bytes", "bytes of the target's features that the verdict brought for the drafter"
)
DURABLE = Attribute("splitspec.durable", "whether the journal had the tokens when they were sent")
QUEUE_US = Attribute("splitspec.server.queue_us", "the server's wait for its model, in microseconds")
MODEL_US = Attribute("splitspec.server.model_us", "the server's model passes, in microseconds")
SAMPLING_US = Attribute(
    "splitspec.server.sampling_us", "the server's sampling or verification, in microseconds"
)
TOTAL_US = Attribute("splitspec.server.total_us", "arrival to answer at the server, in microseconds")
WIRE_US = Attribute("splitspec.wire_us", "round trip less the server's total, in microseconds")

# Of the request span: one number for each round, so that a request costs one span however long it is.
ROUNDS_NUM_DRAFT_TOKENS = Attribute("splitspec.rounds.num_draft_tokens", "proposal length of each round")
ROUNDS_NUM_ACCEPTED = Attribute("splitspec.rounds.num_accepted", "accepted draft tokens of each round")
ROUNDS_PROPOSE_US = Attribute(
    "splitspec.rounds.propose_us", "wait for each round's proposal, in microseconds"
)
ROUNDS_VERIFY_US = Attribute("splitspec.rounds.verify_us", "wait for each round's verdict, in microseconds")
ROUNDS_TOTAL_US = Attribute("splitspec.rounds.total_us", "each round from start to commit, in microseconds")

# Of the round span: the control's choice and what it rests on.
MODE = Attribute(
    "splitspec.round.mode",
    'how it drafts: "plain", "sequential", "pipelined", "prefetch_pull" or "prefetch_push"',
)
CONTROL_NUM_DRAFT_TOKENS = Attribute(
    "splitspec.control.num_draft_tokens", "proposal length that the control chose"
)
CONTROL_NUM_AHEAD = Attribute(
    "splitspec.control.num_ahead",
    "plain tokens granted ahead, proposals drafted ahead, or verdicts prepared for, at most",
)
CONTROL_TRIED = Attribute(
    "splitspec.control.tried", "true for a choice that isn't the best one known, made to learn"
)
CONTROL_PREDICTED = Attribute(
    "splitspec.control.predicted_tokens_per_s", "tokens per second that the control expects of its choice"
)
CONTROL_ACCEPTANCE = Attribute(
    "splitspec.control.acceptance",
    "chance of each draft token to be accepted if those before it are, as a list",
)
CONTROL_PASS_MS = Attribute(
    "splitspec.control.pass_ms", "expected target pass with its queue, in milliseconds"
)
CONTROL_DRAFT_MS = Attribute(
    "splitspec.control.draft_ms", "expected time of the proposal on the draft worker, in milliseconds"
)
CONTROL_ROUND_TRIP_MS = Attribute(
    "splitspec.control.round_trip_ms", "round trips to both workers together, in milliseconds"
)
CONTROL_HIT_RATE = Attribute(
    "splitspec.control.hit_rate", "share of verdicts that a proposal was prepared for"
)
CONTROL_LOAD = Attribute(
    "splitspec.control.load", "share of its time on the target that a proposal waits for the model"
)
CONTROL_SESSIONS = Attribute(
    "splitspec.control.sessions", "requests that share the target worker, as far as the coordinator knows"
)

_SERVER_TIMES = (QUEUE_US, MODEL_US, SAMPLING_US, TOTAL_US)
_STAMP = (CONVERSATION_ID, EPOCH, ROUND, BASE_LENGTH)

# Spans of the coordinator.
REQUEST = SpanName(
    "request",
    (),
    "one Generate call; a child of the caller's span when its metadata names one",
    (
        *(OPERATION, PROVIDER, MODEL, MAX_TOKENS, TEMPERATURE, TOP_P, TOP_K, CONVERSATION_ID),
        *(FINISH_REASONS, INPUT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS),
        *(RPC_SYSTEM, RPC_METHOD, RPC_STATUS, ERROR_TYPE, REQUEST_ID, EPOCH, RULE, DRAFTER),
        *(ROUNDS_NUM_DRAFT_TOKENS, ROUNDS_NUM_ACCEPTED),
        *(ROUNDS_PROPOSE_US, ROUNDS_VERIFY_US, ROUNDS_TOTAL_US),
    ),
    kind=SpanKind.SERVER,
)
READ = SpanName(
    "read", ("request",), "checking the request and making token ids of its prompt", (ERROR_TYPE,)
)
ADMIT = SpanName(
    "admit", ("request",), "taking the session over in Redis, and noting the request in it", (ERROR_TYPE,)
)
CHOOSE = SpanName(
    "choose",
    ("request",),
    "finding a worker in the directory; with new ones, their handshake",
    (ROLE, ERROR_TYPE),
)
OPEN = SpanName(
    "open",
    ("request",),
    "opening the session on a worker, which feeds the tokens that it lacks; the two workers side by side",
    (ROLE, WORKER_ID, CACHED_TOKENS, NUM_TOKENS, WIRE_US, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.CLIENT,
)
ROUND_SPAN = SpanName(
    "round",
    ("request",),
    "one round",
    (
        *(ROUND, BASE_LENGTH, NUM_DRAFT_TOKENS, NUM_ACCEPTED, NEXT_ORIGIN, MODE),
        *(CONTROL_NUM_DRAFT_TOKENS, CONTROL_NUM_AHEAD, CONTROL_TRIED, CONTROL_PREDICTED),
        *(CONTROL_ACCEPTANCE, CONTROL_PASS_MS, CONTROL_DRAFT_MS, CONTROL_ROUND_TRIP_MS),
        *(CONTROL_HIT_RATE, CONTROL_LOAD, CONTROL_SESSIONS, ERROR_TYPE),
    ),
    kept_when_slow=True,
)
PROPOSE = SpanName(
    "propose",
    ("round",),
    "waiting for the proposal",
    (WORKER_ID, NUM_DRAFT_TOKENS, MISSED, WIRE_US, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.CLIENT,
)
VERIFY = SpanName(
    "verify",
    ("round",),
    "waiting for the verdict on a proposal",
    (WORKER_ID, NUM_ACCEPTED, NUM_ONE_HOT, FEATURE_BYTES, WIRE_US, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.CLIENT,
)
DECODE = SpanName(
    "decode",
    ("round",),
    "waiting for the next plain token",
    (WORKER_ID, FEATURE_BYTES, WIRE_US, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.CLIENT,
)
COMMIT = SpanName("commit", ("round",), "the final cut of the verdict's tokens", (NUM_TOKENS, ERROR_TYPE))
DELIVER = SpanName(
    "deliver",
    ("round", "request"),
    "journal and client, beside the next round; of a retried request's earlier tokens before any round",
    (NUM_TOKENS, DURABLE, ERROR_TYPE),
)
JOURNAL = SpanName(
    "journal", ("request", "deliver"), "waiting until Redis has the prompt, or the tokens", (ERROR_TYPE,)
)
CLOSE = SpanName(
    "close", ("request",), "leaving the workers, which keep the KV of the client's session", (ERROR_TYPE,)
)
LEAVE = SpanName("leave", ("request",), "giving the session up in Redis", (ERROR_TYPE,))

# Spans of the workers; the parent comes in the message.
DRAFT_OPEN = SpanName(
    "draft.open",
    ("open",),
    "the draft worker opens the session",
    (WORKER_ID, *_STAMP, DRAFTER, CACHED_TOKENS, NUM_TOKENS, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.SERVER,
)
DRAFT_PROPOSE = SpanName(
    "draft.propose",
    ("propose",),
    "the drafter makes a proposal",
    (WORKER_ID, *_STAMP, DRAFTER, NUM_DRAFT_TOKENS, STALE, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.SERVER,
)
TARGET_OPEN = SpanName(
    "target.open",
    ("open",),
    "the target worker opens the session",
    (WORKER_ID, *_STAMP, CACHED_TOKENS, NUM_TOKENS, *_SERVER_TIMES, ERROR_TYPE),
    kind=SpanKind.SERVER,
)
TARGET_VERIFY = SpanName(
    "target.verify",
    ("verify",),
    "the target verifies a proposal",
    (
        *(WORKER_ID, *_STAMP, NUM_DRAFT_TOKENS, NUM_ACCEPTED, NUM_ONE_HOT),
        *(REPEATED, STALE, *_SERVER_TIMES, ERROR_TYPE),
    ),
    kind=SpanKind.SERVER,
)
TARGET_DECODE = SpanName(
    "target.decode",
    ("decode",),
    "the target draws the plain tokens of one grant; tokens after the first belong to later rounds",
    (WORKER_ID, *_STAMP, NUM_TOKENS, STALE, ERROR_TYPE),
    kind=SpanKind.SERVER,
)

# Metrics. Bounds of the gen_ai histograms are those of the convention.
_REQUEST_ATTRIBUTES = (OPERATION, PROVIDER, MODEL, ERROR_TYPE)
_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_STEP_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "Time of a request, from its arrival to its end; its count is the number of requests.",
    _REQUEST_ATTRIBUTES,
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "Time from a request's arrival to its first token; successful requests only.",
    (OPERATION, PROVIDER, MODEL),
    _TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "Time per token after the first; successful requests of two tokens or more only.",
    (OPERATION, PROVIDER, MODEL),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
PROMPT_TOKENS = Metric("splitspec.prompt_tokens", Kind.COUNTER, "{token}", "Prompt tokens of requests.")
PROMPT_TOKENS_CACHED = Metric(
    "splitspec.prompt_tokens_cached",
    Kind.COUNTER,
    "{token}",
    "Prompt tokens that the target worker held and wasn't fed again.",
)
GENERATION_TOKENS = Metric(
    "splitspec.generation_tokens", Kind.COUNTER, "{token}", "Committed tokens of the output."
)
NUM_DRAFTS = Metric(
    "splitspec.spec_decode.num_drafts", Kind.COUNTER, "{round}", "Rounds that verified a proposal."
)
NUM_DRAFTED_TOKENS = Metric(
    "splitspec.spec_decode.num_draft_tokens", Kind.COUNTER, "{token}", "Draft tokens that were verified."
)
NUM_ACCEPTED_TOKENS = Metric(
    "splitspec.spec_decode.num_accepted_tokens", Kind.COUNTER, "{token}", "Draft tokens that were accepted."
)
POSITION = Attribute("position", "position in the proposal, from 0")
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "splitspec.spec_decode.num_accepted_tokens_per_pos",
    Kind.COUNTER,
    "{token}",
    "Draft tokens that were accepted, by their position in the proposal.",
    (POSITION,),
)
PLAIN_ROUNDS = Metric(
    "splitspec.plain_rounds", Kind.COUNTER, "{round}", "Rounds without a proposal, for whatever reason."
)
MISSED_ROUNDS = Metric(
    "splitspec.missed_rounds",
    Kind.COUNTER,
    "{round}",
    "Rounds that were plain because the draft worker was late, lost or left out after misses.",
)
ONE_HOT_TOKENS = Metric(
    "splitspec.one_hot_tokens",
    Kind.COUNTER,
    "{token}",
    "Draft tokens verified as one-hot: their distribution was absent, broken or sealed for something else.",
)
SEAL_MISMATCHES = Metric(
    "splitspec.seal_mismatches",
    Kind.COUNTER,
    "{round}",
    "Rounds whose distributions were sealed for other parameters or tokens, so that none was used.",
)
STALE_MESSAGES = Metric(
    "splitspec.stale_messages", Kind.COUNTER, "{message}", "Messages that a worker dropped as stale."
)
LIVE_SESSIONS = Metric("splitspec.live_sessions", Kind.GAUGE, "{session}", "Sessions with a running request.")
HANDLES = Metric(
    "splitspec.handles", Kind.GAUGE, "{handle}", "Handles that a worker keeps, with or without a stream."
)
KV_TOKENS = Metric("splitspec.kv_tokens", Kind.GAUGE, "{token}", "Tokens of KV that a worker holds.")
KV_BLOCKS_USED = Metric(
    "splitspec.kv_blocks_used", Kind.GAUGE, "{block}", "Blocks of KV that some session holds."
)
KV_BLOCKS_SHARED = Metric(
    "splitspec.kv_blocks_shared", Kind.GAUGE, "{block}", "Blocks of KV that several sessions hold."
)
KV_BLOCKS_CACHED = Metric(
    "splitspec.kv_blocks_cached",
    Kind.GAUGE,
    "{block}",
    "Blocks of KV that no session holds, kept for a text that begins alike until their room is needed.",
)
KV_BLOCKS_FREE = Metric("splitspec.kv_blocks_free", Kind.GAUGE, "{block}", "Blocks of KV without content.")
KV_MEMORY = Metric("splitspec.kv_memory", Kind.GAUGE, "By", "Memory of the KV that a worker holds.")
ROUND_DURATION = Metric(
    "splitspec.round.duration",
    Kind.HISTOGRAM,
    "s",
    "Time of a round, from its start to the final cut.",
    buckets=_STEP_BUCKETS,
)
WIRE_DURATION = Metric(
    "splitspec.wire.duration",
    Kind.HISTOGRAM,
    "s",
    "Round trip to a worker less the worker's own total: network, gRPC and event loops.",
    (ROLE,),
    _STEP_BUCKETS,
)
QUEUE_DURATION = Metric(
    "splitspec.queue.duration",
    Kind.HISTOGRAM,
    "s",
    "Time that a message waited for the worker's model.",
    buckets=_STEP_BUCKETS,
)
MODEL_DURATION = Metric(
    "splitspec.model.duration",
    Kind.HISTOGRAM,
    "s",
    "Time of the model passes for one message.",
    buckets=_STEP_BUCKETS,
)


_ALL = tuple(globals().values())
ATTRIBUTES = {value.name: value for value in _ALL if isinstance(value, Attribute)}
SPANS = {value.name: value for value in _ALL if isinstance(value, SpanName)}
METRICS = {value.name: value for value in _ALL if isinstance(value, Metric)}
