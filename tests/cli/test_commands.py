"""The commands as a user starts them: what they print, where, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitspec.config import ServerSettings
from splitspec.errors import NotFoundError
from splitspec.serving import Server
from splitspec.types import Origin
from tests.cli.test_stack import alive
from tests.client.scripted import Script, chunk, finished, serving, started, whole

COMMAND = Path(sys.executable).with_name("splitspec")
BARE = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("SPLITSPEC_") and name not in ("FORCE_COLOR", "COLUMNS")
}


def splitspec(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=280, env={**BARE, **environment})


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what was wrong."""
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == done.stderr.splitlines()[-1:]
    return errors[0]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["up"], "--model"),
        (["up", "--model", "m", "--port", "70000"], "--port"),
        (["up", "--model", "m", "--dtype", "int3"], "--dtype"),
        (["generate"], "address"),
        (["generate", "127.0.0.1:1"], "prompt"),
        (["generate", "127.0.0.1:1", "Hi", "--temperature", "warm"], "--temperature"),
        (["serve", "nobody"], "nobody"),
        (["nothing"], "nothing"),
    ],
)
def test_wrong_arguments(arguments: list[str], names: str) -> None:
    done = splitspec(*arguments)
    assert done.returncode == 2
    assert names in done.stderr.lower()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("role", ["coordinator", "draft", "target"])
def test_serve_shows_the_flags_of_the_server_itself(role: str) -> None:
    done = splitspec("serve", role, "--help")
    assert done.returncode == 0
    assert "--shutdown-grace-s" in done.stdout


def test_serve_passes_flags_and_exit_code_on() -> None:
    done = splitspec("serve", "target", "--model", "m", "--max-positions", "none")
    assert done.returncode == 2
    assert "--max-positions" in sentence(done)
    assert "'none'" in sentence(done)


def test_up_with_a_broken_gguf_file(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    done = splitspec("up", "--model", model, SPLITSPEC_CACHE_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert str(model) in sentence(done)
    assert "GGUF" in sentence(done)
    assert not list(tmp_path.glob("splitspec-*")), "the logs of a wrong setting say no more than its sentence"


def test_up_with_redis_away() -> None:
    done = splitspec("up", "--model", "/nowhere", "--redis-url", "redis://127.0.0.1:1/0")
    assert done.returncode == 2
    assert "redis://127.0.0.1:1/0" in sentence(done)
    again = splitspec("up", "--model", "/nowhere", SPLITSPEC_REDIS_URL="redis://127.0.0.1:1/0")
    assert "redis://127.0.0.1:1/0" in sentence(again)


@pytest.mark.model
def test_up_with_an_unknown_drafter(demo_model: Path) -> None:
    done = splitspec("up", "--model", demo_model, "--drafters", "nonsense", "--port", 0)
    assert done.returncode == 2
    assert "nonsense" in sentence(done)
    assert "lookup" in sentence(done)


@pytest.mark.model
def test_up_on_a_port_that_is_taken(demo_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = splitspec("up", "--model", demo_model, "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in sentence(done)


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_until_a_signal(demo_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = [str(word) for word in (COMMAND, "up", "--model", demo_model, "--port", 0, "--log-dir", tmp_path)]
    # Ignored, as shells have it in the background, or not, however the tests themselves run.
    in_background = number is signal.SIGTERM
    reaction = signal.SIG_IGN if in_background else signal.default_int_handler
    before = signal.signal(signal.SIGINT, reaction)
    up = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=BARE)
    signal.signal(signal.SIGINT, before)
    with up:
        assert up.stdout is not None
        address = up.stdout.readline().strip()
        assert splitspec("health", address, "splitspec.v1.CoordinatorService").returncode == 0
        done = splitspec("generate", address, "Hi", "--temperature", 0, "--max-tokens", 4)
        assert done.returncode == 0, done.stderr
        children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
        assert len(children) == 4
        up.send_signal(signal.SIGINT)  # which the background ignores
        up.send_signal(number)
        rest, errors = up.communicate(timeout=60)
    assert (rest, up.returncode) == ("", 128 + number)
    assert "Traceback" not in errors
    assert f"; {f'kill {up.pid}' if in_background else 'Ctrl-C'} stops everything" in errors
    assert errors.splitlines()[-1] == ("terminated" if in_background else "interrupted")
    assert not any(alive(int(child)) for child in children)


def test_generate_in_a_pipe_is_the_bare_text(address: str, script: Script) -> None:
    done = splitspec(
        "generate", address, "Say", "hi", "--temperature", 0, "--stop", "!", "--stop", "?", "-k", 2
    )
    assert (done.returncode, done.stdout) == (0, "Grüße\n")
    assert "4 tokens, ended by stop_string" in done.stderr
    request = script.requests[0]
    assert [message.content for message in request.chat.messages] == ["Say hi"]
    assert list(request.stop.stop_strings) == ["!", "?"]
    assert (request.sampling.temperature, request.speculation.num_draft_tokens) == (0, 2)
    splitspec("generate", address, "--text", "Say", "hi", "--no-speculate")
    assert (script.requests[1].text, script.requests[1].speculation.disabled) == ("Say hi", True)


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_generate_takes_nothing_in_the_text_for_markup(
    address: str, script: Script, colour: dict[str, str]
) -> None:
    text = "[red]:smile:"
    script.answer = lambda context: [started(), chunk(0, text, (1, Origin.PLAIN, len(text))), finished()]
    assert splitspec("generate", address, "Hi", **colour).stdout == f"{text}\n"


def test_generate_in_colour(address: str) -> None:
    done = splitspec("generate", address, "Hi", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[4;32mü" in done.stdout, "accepted tokens are green and underlined"
    plain = splitspec("generate", address, "Hi", FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert "\x1b[4mü" in plain.stdout, "and underlined without colour"


def test_generate_json(address: str) -> None:
    done = splitspec("generate", address, "Hi", "--json")
    shown = json.loads(done.stdout)
    assert shown["text"] == "Grüße"
    assert [token["origin"] for token in shown["tokens"]] == ["plain", "accepted", "accepted", "bonus"]
    assert shown["finished"]["usage"] == {"prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": 4}


def test_generate_says_what_the_coordinator_says(address: str, script: Script) -> None:
    def answer(context: object) -> Iterator[object]:
        yield whole()[0]
        raise NotFoundError("speculation.drafter is '[x]', expected one of: lookup")

    script.answer = answer  # type: ignore[assignment]
    done = splitspec("generate", address, "Hi", "--json")
    assert done.returncode == 1
    assert sentence(done) == "error: speculation.drafter is '[x]', expected one of: lookup"


def test_generate_without_a_coordinator() -> None:
    done = splitspec("generate", "127.0.0.1:1", "Hi")
    assert done.returncode == 1
    assert "coordinator at 127.0.0.1:1 can't be reached" in sentence(done)


async def test_health() -> None:
    async with Server(ServerSettings(), ["test.Service"], lambda server: None) as server:
        alive = await asyncio.to_thread(splitspec, "health", server.address)
        assert (alive.returncode, alive.stdout) == (0, "SERVING\n")
        early = await asyncio.to_thread(splitspec, "health", server.address, "test.Service")
        assert (early.returncode, early.stdout) == (1, "NOT_SERVING\n")
        await server.set_ready()
        ready = await asyncio.to_thread(splitspec, "health", server.address, "test.Service")
        assert (ready.returncode, ready.stdout) == (0, "SERVING\n")
        unknown = await asyncio.to_thread(splitspec, "health", server.address, "no.Service")
        assert unknown.returncode == 1
        assert "no.Service" in sentence(unknown)
    away = await asyncio.to_thread(splitspec, "health", "127.0.0.1:1")
    assert away.returncode == 1
    assert "127.0.0.1:1" in sentence(away)


@pytest.mark.model
def test_fetch_demo_model_prints_its_directory(demo_model: Path) -> None:
    done = splitspec(
        "fetch-demo-model", **{k: v for k, v in os.environ.items() if k == "SPLITSPEC_CACHE_DIR"}
    )
    assert (done.returncode, done.stdout) == (0, f"{demo_model}\n")


def test_demo_that_can_not_begin(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = splitspec("demo", SPLITSPEC_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 2
    assert "SPLITSPEC_CACHE_DIR" in sentence(done)


@pytest.mark.model
@pytest.mark.full
def test_demo(demo_model: Path) -> None:
    done = splitspec("demo", SPLITSPEC_CACHE_DIR=str(demo_model.parent.parent))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert rows["same tokens as plain"][:2] == ["yes", "yes"]
    question, summary, sampled = map(float, rows["draft acceptance rate"])
    assert summary > question
    assert 0 < sampled < 1
    assert "first answers" in done.stdout
