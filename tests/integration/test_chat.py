"""`splitspec chat` as a user runs it, with lines from a pipe, on the demo model's stack."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions, Message
from splitspec.types import Origin
from tests.integration.conftest import settle_empty, tiny_stack

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

LINES = b"My name is Ada. Say hello.\n\n" + b"word " * 9000 + b"\nWhat is my name?\n"


async def test_chat_is_one_session(stack: Stack) -> None:
    program = Path(sys.executable).with_name("splitspec")
    arguments = ["chat", stack.address, "--temperature", "0", "--max-tokens", "30", "--drafter", "lookup"]
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(LINES)
    assert process.returncode == 0, errors
    assert len([line for line in output.decode().splitlines() if line]) >= 2
    # The turn that is too long ends alone; the empty line is none.
    assert errors.decode().count("error: prompt is") == 1
    turns = re.findall(r"(\d+) of (\d+) prompt tokens fed", errors.decode())
    assert len(turns) == 2
    (first, whole), (second, longer) = [(int(fed), int(total)) for fed, total in turns]
    assert first == whole
    assert second < 20 < longer
    # The session is closed with the chat.
    await settle_empty(stack)


#: Keeps an answer's letters no longer than it is the last: later turns have it in capitals.
CHANGES_ANSWERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | upper if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def changing_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("changing") / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(CHANGES_ANSWERS)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def changing(changing_model: Path) -> AsyncIterator[Stack]:
    """A tiny stack with a template that changes earlier text, as templates do that leave thoughts out."""
    async with tiny_stack(changing_model) as stack:
        yield stack


@pytest.mark.parametrize("drafter", ["lookup", "model"])
async def test_a_template_that_changes_earlier_text_is_fed_anew_from_there(
    changing: Stack, changing_model: Path, drafter: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(changing_model)
    chat: list[dict[str, str]] = []
    async with AsyncClient(changing.address) as client:
        options: GenerateOptions = {"temperature": 0.0, "max_tokens": 24, "drafter": drafter}
        session = f"changing {drafter}"
        for number, question in enumerate(["One?", "Two?", "Three?"]):
            chat.append({"role": "user", "content": question})
            ids: list[int] = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            alone = await client.generate(ids, **options).result()
            named: GenerateOptions = {"session_id": session, "request_id": f"{session} {number}", **options}
            for _ in range(2):  # a retry too gets what a request with all of the text gets
                said = await client.generate([Message("user", question)], **named).result()
                assert said.started.prompt_tokens == len(ids)
                assert said.token_ids == alone.token_ids
            assert {token.origin for token in said.tokens} == {Origin.REPEATED}
            chat.append({"role": "assistant", "content": str(tokenizer.decode(said.token_ids))})
        # KV stays for what both have in common: all before the last answer.
        options["session_id"] = session
        last = await client.generate([Message("user", "Four?")], **options).result()
        assert last.started.cached_tokens >= len(ids)
        assert await client.close_session(session)


async def test_chat_goes_on_where_a_template_changes_earlier_text(changing: Stack) -> None:
    program = Path(sys.executable).with_name("splitspec")
    process = await asyncio.create_subprocess_exec(
        *(program, "chat", changing.address, "--temperature", "0", "--max-tokens", "8"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate(b"One?\nTwo?\nThree?\n")
    assert (process.returncode, errors.decode().count("prompt tokens fed")) == (0, 3), errors


async def test_chat_without_a_server() -> None:
    program = Path(sys.executable).with_name("splitspec")
    process = await asyncio.create_subprocess_exec(
        program,
        "chat",
        "127.0.0.1:1",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate(b"hello\n")
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" not in errors
