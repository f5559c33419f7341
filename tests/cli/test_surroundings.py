"""The commands where terminals, streams, files and signals aren't as expected: a line, no traceback."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitspec.engine.simulated import SimulatedConfig
from tests.cli.test_commands import BARE, COMMAND, sentence, splitspec
from tests.cli.test_stack import alive
from tests.client.scripted import Script, serving
from tests.client.test_client import waits

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii"}])
def test_a_terminal_without_umlauts(address: str, environment: dict[str, str]) -> None:
    done = splitspec("generate", address, "Hi", **environment)
    assert (done.returncode, done.stdout) == (0, "Gr\\xfc\\xdfe\n")
    shown = splitspec("generate", address, "Hi", "--json", **environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert '"text": "Gr\\u00fc\\u00dfe"' in shown.stdout


@pytest.mark.parametrize("columns", ["0", "1", "-1", "wide"])
def test_any_width(address: str, columns: str) -> None:
    done = splitspec("generate", address, "Hi", COLUMNS=columns, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm")
    assert done.returncode == 0
    assert "Gr" in done.stdout
    assert "lookup" in re.sub(r"\x1b\[[\d?]*[A-Za-z]|\n", "", done.stderr)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_input_that_is_not_text(address: str, script: Script, locale: str) -> None:
    done = subprocess.run(
        [COMMAND, "chat", address],
        input=b"caf\xe9\nHi\r\n",
        capture_output=True,
        timeout=60,
        env={**BARE, "LC_ALL": locale},
    )
    assert done.returncode == 0
    assert b"prompt[0].content is 'caf\\udce9', expected text" in done.stderr
    assert b"byte 0xe9 at index 3" in done.stderr
    assert done.stdout == "Grüße\n".encode()
    assert script.requests[0].chat.messages[0].content == "Hi"
    argument = splitspec("generate", address, os.fsdecode(b"caf\xe9"), LC_ALL=locale)
    assert argument.returncode == 1
    assert "byte 0xe9 at index 3" in sentence(argument)


def test_closed_streams(address: str) -> None:
    for words in (f"chat {address} <&-", f"generate {address} Hi >&-", f"generate {address} Hi 2>&-"):
        done = shell(f"{COMMAND} {words}")
        assert done.returncode == 0
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", ["generate {} Hi", "generate {} Hi --json", "generate --help", "config coordinator --model m"]
)
def test_a_reader_that_is_gone(address: str, words: str) -> None:
    """As behind `| head -1`, which has ended."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [COMMAND, *words.format(address).split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=BARE,
    )
    os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr


@pytest.mark.parametrize("words", ["generate {} Hi", "generate {} Hi --json", "config coordinator --model m"])
def test_a_full_disk(address: str, words: str) -> None:
    done = shell(f"{COMMAND} {words.format(address)} >/dev/full")
    assert done.returncode == 1
    assert sentence(done) == "error: No space left on device"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["up", "--model", "m", "--log-dir", "{file}"], "--log-dir is '{file}': File exists, expected"),
        (["up", "--model", "m", "--log-dir", "/proc/no"], "--log-dir is '/proc/no': No such file"),
        (["simulate", "{file}"], "{file}"),
        (["simulate", "/proc/no/model"], "/proc/no"),
        (["train", "curve", "{file}"], "{file}"),
    ],
)
def test_files_and_directories(tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "file").touch()
    names = {"file": str(tmp_path / "file")}
    done = splitspec(*[word.format(**names) for word in words])
    assert done.returncode in (1, 2)
    assert expected.format(**names) in sentence(done)


@pytest.mark.parametrize("command", ["generate", "chat", "health"])
@pytest.mark.parametrize("wrong", ["localhost", "http://127.0.0.1:1", "::1", "127.0.0.1:70000"])
def test_wrong_addresses(command: str, wrong: str) -> None:
    done = splitspec(command, wrong, *(["Hi"] if command == "generate" else []))
    assert done.returncode == 2
    assert f"address is '{wrong}'" in done.stderr
    assert "Traceback" not in done.stderr


def started(*words: object, **options: object) -> subprocess.Popen[str]:
    """A command with the terminal's reaction to Ctrl-C, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process: subprocess.Popen[str] = subprocess.Popen(
            [str(word) for word in (COMMAND, *words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=BARE,
            **options,  # type: ignore[call-overload]
        )
        return process
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_while_text_comes(address: str, script: Script, number: signal.Signals, word: str) -> None:
    script.answer = waits
    with started("generate", address, "Hi") as running:
        assert running.stdout is not None
        assert running.stdout.read(3) == "Grü"
        running.send_signal(number)
        _, errors = running.communicate(timeout=30)
    assert (running.returncode, errors) == (128 + number, f"{word}\n")
    assert script.ended.wait(10)


def test_ctrl_c_at_the_prompt_of_a_chat(address: str, script: Script) -> None:
    ours, theirs = pty.openpty()
    with started("chat", address, stdin=theirs) as running:
        os.close(theirs)
        assert running.stderr is not None
        assert running.stderr.readline().startswith("session chat-")
        assert running.stderr.read(2) == "> "
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    os.close(ours)
    assert (running.returncode, errors.strip()) == (130, "interrupted")
    assert [type(request).__name__ for request in script.requests] == ["CloseSessionRequest"]


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_while_processes_start(tmp_path: Path, number: signal.Signals, word: str) -> None:
    SimulatedConfig(16, 1).save(tmp_path / "model")
    with started("up", "--model", tmp_path / "model", "--port", 0, "--log-dir", tmp_path) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("Redis: ")
        assert running.stderr.readline()
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert errors.splitlines()[-1] == word
    assert "Traceback" not in errors
    assert not any(alive(int(child)) for child in children)


def test_ctrl_c_while_a_server_starts() -> None:
    """A Redis that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        running = started("serve", "coordinator", "--model", "m", "--redis-url", url)
        with running, silent.accept()[0]:
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, env=BARE, stdin=subprocess.DEVNULL
    )
