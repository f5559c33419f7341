"""The features that one session's drafter wants, as verdicts bring them."""

from __future__ import annotations

from protos.v1 import common_pb2, target_pb2
from splitspec.engine.kv import KV
from splitspec.engine.paged import PagedLM
from splitspec.errors import InvalidRequestError
from splitspec.features import FeatureFormat


class FeatureReader:
    """Reads what Verify and Decode ask for out of a session's KV."""

    def __init__(self, model: PagedLM, request: common_pb2.FeatureRequest) -> None:
        """request: of the session's Open; without layers it asks for none. Raises InvalidRequestError."""
        self._model = model
        self._format = FeatureFormat.from_proto(request)
        kept = list(model.info.feature_layers)
        if self._format is not None and not set(self._format.layers) <= set(kept):
            expected = f"layers that this worker keeps, of {kept} (its setting feature_layers)"
            raise InvalidRequestError.of("open.features.layers", list(self._format.layers), expected)
        self._columns = [kept.index(layer) for layer in request.layers]

    def start(
        self, kind: str, message: target_pb2.Verify | target_pb2.Decode, num_committed: int
    ) -> int | None:
        """The first token whose features are asked for, None for none at all. Raises InvalidRequestError."""
        if not message.HasField("features_start"):
            return None
        start = message.features_start
        if self._format is None:
            raise InvalidRequestError.of(f"{kind}.features_start", start, "none, as open.features has none")
        if start >= num_committed:
            expected = f"0 to {num_committed - 1}, the committed tokens but the last"
            raise InvalidRequestError.of(f"{kind}.features_start", start, expected)
        return start

    def read(self, kv: KV, start: int | None) -> common_pb2.Features | None:
        """Those of the tokens that the KV holds from `start` on, or of as many as a message takes.

        Called on the model's thread.
        """
        if start is None or self._format is None:
            return None
        stop = min(kv.length, start + self._format.most_tokens(self._model.pool.features.shape[-1]))
        return self._format.encode(start, self._model.features(kv, start, stop)[:, self._columns])
