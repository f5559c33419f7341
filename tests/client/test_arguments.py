"""What callers pass: right values of any library are taken, wrong ones refused before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from splitspec.client import AsyncClient, Client, Message, Rule, UnknownOptionError
from splitspec.errors import InvalidRequestError
from tests.client.scripted import Script, serving

USER = {"role": "user", "content": "Hi"}
UINT32 = "an integer from 0 to 2**32 - 1"
PROMPT = "text, a list of messages, or a list of token ids"


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def client(script: Script) -> Iterator[Client]:
    with serving(script) as address, Client(address) as client:
        yield client


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("prompt", "field", "expected"),
    [
        *((wrong, "prompt", PROMPT) for wrong in (b"a", bytearray(b"a"), memoryview(b"ab"), None, 5, True)),
        *((wrong, "prompt", PROMPT) for wrong in (USER, Message("user", "Hi"), {1, 2}, iter([1]), int)),
        (Unprintable(), "prompt", PROMPT),
        (np.array(3), "prompt", PROMPT),
        ([], "prompt", "at least one token id or message"),
        ("x" * 2**22, "prompt", "a request of at most 4194304"),
        ("a\ud800", "prompt", "without the lone surrogate U+D800 at index 1"),
        (["Hi"], "prompt[0]", "a Message, or the integer of a token"),
        ([None], "prompt[0]", "a Message, or the integer of a token"),
        ([b"a"], "prompt[0]", "a Message, or the integer of a token"),
        (np.array([[1, 2]]), "prompt[0]", "a Message, or the integer of a token"),
        (torch.tensor([[5]]), "prompt[0]", "a Message, or the integer of a token"),
        ([1, "two"], "prompt[1]", UINT32),
        ([1, 2.0], "prompt[1]", UINT32),
        ([1, True], "prompt[1]", UINT32),
        ([np.bool_(True)], "prompt[0]", UINT32),
        (torch.tensor([True]), "prompt[0]", UINT32),
        (np.array([1.0]), "prompt[0]", UINT32),
        ([-1], "prompt[0]", UINT32),
        ([2**32], "prompt[0]", UINT32),
        ([10**5000], "prompt[0]", UINT32),
        ([{"role": "user"}], "prompt[0]", "a dict with role and content alone"),
        ([USER | {"name": "me"}], "prompt[0]", "a dict with role and content alone"),
        ([USER, 3], "prompt[1]", "a Message"),
        ([USER | {"role": None}], "prompt[0].role", "text"),
        ([USER | {"content": None}], "prompt[0].content", "text"),
        ([USER, USER | {"content": [{"type": "text", "text": "Hi"}]}], "prompt[1].content", "text"),
        ([USER | {"content": b"Hi"}], "prompt[0].content", "text"),
        ([USER | {"content": "\udce9"}], "prompt[0].content", "without the byte 0xe9 at index 0"),
    ],
)
def test_wrong_prompts(client: Client, script: Script, prompt: Any, field: str, expected: str) -> None:
    refused(client, script, field, expected, prompt)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("max_tokens", value, UINT32) for value in (1.0, "1", True, [1], np.float64(1), -1, 2**32, 1j)),
        *((name, 2.5, UINT32) for name in ("top_k", "logprobs", "min_tokens", "num_draft_tokens")),
        *((name, -1, UINT32) for name in ("top_k", "min_tokens", "num_draft_tokens", "resume_offset")),
        *(("seed", value, "an integer from 0 to 2**64 - 1") for value in (-1, 2**64, 1.0)),
        *(("temperature", value, "a number") for value in ("0", True, 1j, [0.5], 10**400)),
        *(("top_p", value, "a number") for value in ("1", b"1")),
        *(("ignore_eos", value, "True or False") for value in (1, "no", 0.0)),
        *(("speculate", value, "True or False") for value in (0, "")),
        *(("stop", value, "a list of texts") for value in ("!", b"!", 5, {"!": 1})),
        *(("stop_token_ids", value, "a list of integers") for value in (5, "56", b"56", {5: 6})),
        *(("logit_bias", value, "a mapping of token ids to numbers") for value in ([(1, 2)], "a", 5)),
        *(
            ("logit_bias", value, "each with a number")
            for value in ({"15": 1.0}, {1: "a"}, {1: None}, {True: 1.0}, {1.0: 1.0}, {-1: 0.0})
        ),
        *(("rule", value, "one of Rule.GREEDY, ") for value in ("token", 1)),
        ("mode", "plain", "one of Mode.PLAIN, "),
        *((name, 7, "text") for name in ("drafter", "session_id", "request_id", "tenant")),
        ("session_id", "\udcff", "without the byte 0xff at index 0"),
        *(("timeout", value, "seconds above 0") for value in (0, -1, math.inf, math.nan, 1e300)),
        *(("timeout", value, "a number") for value in ("5", True)),
    ],
)
def test_options_of_a_wrong_type(
    client: Client, script: Script, option: str, value: Any, expected: str
) -> None:
    refused(client, script, option, expected, "Hi", **{option: value})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: math.nan}}, "sampling.logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "stop.min_tokens"),
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"stop": [""]}, "stop.stop_strings"),
        ({"stop": ["a", b"b"]}, "stop[1]"),
        ({"stop": ["\udc00"]}, "stop[0]"),
        ({"stop_token_ids": [2**32]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [1, 2.0]}, "allowed_token_ids[1]"),
        ({"banned_token_ids": [-1]}, "banned_token_ids[0]"),
    ],
)
def test_options_out_of_range(client: Client, script: Script, options: dict[str, Any], field: str) -> None:
    refused(client, script, field, "", "Hi", **options)


def refused(client: Client, script: Script, field: str, expected: str, prompt: Any, **options: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(prompt, **options)
    assert type(caught.value) is InvalidRequestError
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")
    assert "expected" in str(caught.value)
    assert expected in str(caught.value)
    assert script.requests == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("topk", "did you mean top_k?"),
        ("n", "expected one of: temperature, top_k, "),
    ],
)
def test_options_that_there_are_not(client: Client, script: Script, name: str, hint: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        client.generate("Hi", **{name: 2})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"generate has no option {name} (2); {hint}")
    assert caught.value.field == name
    assert isinstance(caught.value, TypeError)
    assert script.requests == []


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int8])
def test_integers_of_any_library(dtype: Any) -> None:
    for prompt in (np.array([3, 4], dtype), [dtype(3), dtype(4)], range(3, 5), (3, torch.tensor(4))):
        assert sent(prompt).token_ids.ids == [3, 4]
    assert sent(torch.tensor([3, 4])).token_ids.ids == [3, 4]
    request = sent(
        "Hi",
        max_tokens=dtype(5),
        seed=torch.tensor(6),
        temperature=np.float32(0.5),
        top_p=Decimal("0.5"),
        logit_bias={dtype(7): dtype(8)},
        stop_token_ids=np.array([9], dtype),
        banned_token_ids={dtype(10)},
        stop=("a", np.str_("b")),
        ignore_eos=np.bool_(True),
    )
    assert (request.stop.max_tokens, request.sampling.seed) == (5, 6)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.5)
    assert request.sampling.logit_bias == {7: 8.0}
    assert (request.stop.stop_token_ids, request.sampling.banned_token_ids) == ([9], [10])
    assert (request.stop.stop_strings, request.stop.ignore_eos) == (["a", "b"], True)


def test_none_is_as_if_left_out() -> None:
    from splitspec.client.request import GenerateOptions, generate_request

    assert sent("Hi", **dict.fromkeys(GenerateOptions.__annotations__)) == generate_request("Hi", {})


def sent(prompt: Any, **options: Any) -> Any:
    """The request that a server gets."""
    script = Script()
    with serving(script) as address, Client(address) as client:
        client.generate(prompt, **options).result()
    return script.requests[0]


def test_arguments_of_the_other_calls(client: Client, script: Script) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: client.close_session(3), "session_id"),  # type: ignore[arg-type]
        (lambda: client.close_session("s", tenant=b"t"), "tenant"),  # type: ignore[arg-type]
        (lambda: client.close_session("s", timeout=0), "timeout"),
        (lambda: client.describe(timeout=math.nan), "timeout"),
    ]
    for call, field in calls:
        with pytest.raises(InvalidRequestError, match=f"{field} is .*expected") as caught:
            call()
        assert caught.value.field == field
    assert script.requests == []
    assert client.describe(timeout=None).drafters == ()


async def test_async_refuses_the_same(client: Client) -> None:
    async with AsyncClient("127.0.0.1:1") as other:
        with pytest.raises(InvalidRequestError, match=r"max_tokens is 1\.0"):
            other.generate("Hi", max_tokens=1.0)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="rule is 'token'"):
            other.generate("Hi", rule="token")  # type: ignore[arg-type]
        other.generate("Hi", rule=Rule.TOKEN)
        with pytest.raises(InvalidRequestError, match="session_id is None"):
            await other.close_session(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (["127.0.0.1:1"], "text"),
        (("127.0.0.1", 1), "text"),
        (None, "text"),
        (b"127.0.0.1:1", "text"),
        ("127.0.0.1:\udc31", "without the lone surrogate"),
        ("http://127.0.0.1:1", "host:port without a scheme"),
        ("localhost", "host:port, with a port"),
        ("localhost:70000", "host:port, with a port"),
        ("", "host:port, with a port"),
        ("::1", "an IPv6 address as \\[address\\]:port"),
    ],
)
def test_wrong_addresses(address: Any, expected: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequestError, match=expected) as caught:
            kind(address)
        assert str(caught.value).startswith("address is ")
        assert caught.value.field == "address"


def test_names_of_resolvers_are_addresses() -> None:
    for address in ("dns:///localhost:1", "unix:/nowhere"):
        with Client(address) as client, pytest.raises(Exception, match="can't be reached"):
            client.describe()
