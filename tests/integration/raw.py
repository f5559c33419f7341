"""A target worker's stream as a coordinator would hold it, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.tokens import TokenLog
from splitspec.wire import Draft


class Stream:
    """One session at temperature 0, of five tokens; before it opens `tokens` and `features` may be set."""

    def __init__(self, stub: target_pb2_grpc.TargetWorkerServiceAsyncStub, session: str) -> None:
        self.call: Any = stub.TargetSession()
        self.session = session
        self.tokens = TokenLog([11, 12, 13, 14, 15])
        self.features: common_pb2.FeatureRequest | None = None
        self.revision = 0
        self.epoch = 10

    def stamp(self, round_number: int) -> common_pb2.Stamp:
        return common_pb2.Stamp(
            session_id=self.session,
            epoch=self.epoch,
            revision=self.revision,
            round=round_number,
            base_length=len(self.tokens),
            prefix_hash=self.tokens.prefix_hash(),
        )

    async def open(self, handle: str = "", lease_ms: int = 0) -> common_pb2.Opened:
        message = common_pb2.Open(
            handle=handle,
            token_ids=list(self.tokens),
            sampling=common_pb2.SamplingParams(temperature=0, seed=1),
            rule=common_pb2.VERIFICATION_RULE_GREEDY,
            lease_ms=lease_ms,
            features=self.features,
        )
        await self.call.write(target_pb2.TargetSessionRequest(stamp=self.stamp(0), open=message))
        opened: common_pb2.Opened = (await self.call.read()).opened
        return opened

    async def send(
        self,
        round_number: int,
        draft: list[int],
        parents: Sequence[int] = (),
        features_start: int | None = None,
        **changes: int,
    ) -> None:
        stamp = self.stamp(round_number)
        for name, value in changes.items():
            setattr(stamp, name, value)
        body = Draft.certain(draft, parents).encode(b"")
        proposal = common_pb2.Proposal(stamp=stamp, num_draft_tokens=len(draft), body=body)
        verify = target_pb2.Verify(proposal=proposal, features_start=features_start)
        await self.call.write(target_pb2.TargetSessionRequest(stamp=stamp, verify=verify))

    async def verdict(self) -> common_pb2.Verdict:
        verdict: common_pb2.Verdict = (await self.call.read()).verdict
        return verdict

    async def verify(
        self,
        round_number: int,
        draft: list[int],
        parents: Sequence[int] = (),
        features_start: int | None = None,
    ) -> common_pb2.Verdict:
        await self.send(round_number, draft, parents, features_start)
        return await self.committed()

    async def decode(
        self, round_number: int, num_tokens: int, features_start: int | None = None
    ) -> list[common_pb2.Verdict]:
        decode = target_pb2.Decode(num_tokens=num_tokens, features_start=features_start)
        await self.call.write(target_pb2.TargetSessionRequest(stamp=self.stamp(round_number), decode=decode))
        return [await self.committed() for _ in range(num_tokens)]

    async def committed(self) -> common_pb2.Verdict:
        """The next verdict, whose tokens are taken over."""
        verdict = await self.verdict()
        self.tokens.extend(verdict.token_ids)
        self.revision = verdict.stamp.revision
        assert verdict.stamp.prefix_hash == self.tokens.prefix_hash()
        return verdict

    async def refused(self) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call.read()
        return caught.value.code().name, caught.value.details() or ""
