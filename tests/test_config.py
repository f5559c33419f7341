"""Settings: which source wins, what each refusal says, and what is shown of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from splitspec.cli.config import register
from splitspec.config import (
    ROLES,
    CoordinatorSettings,
    DraftSettings,
    ServerSettings,
    TargetSettings,
    explain_settings,
    load_settings,
    redacted,
)
from splitspec.errors import ConfigError

FILE = """
model = "from/file"
redis_url = "redis://user:hunter2@redis:6379/0"
log_level = "warning"

[coordinator]
num_draft_tokens = 6
log_level = "error"
draft_patience = 2

[draft]
drafters = ["lookup", "layer_skip=/model"]
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPLITSPEC_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "splitspec.toml"
    path.write_text(FILE)
    return path


def run_config(*arguments: str) -> Result:
    """`splitspec config ...`, among other commands."""
    app = typer.Typer()
    app.command("other")(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["config", *arguments])


def refusal(cls: type[ServerSettings], *arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_settings(cls, arguments)
    return str(error.value)


def test_flags_go_over_variables_over_the_section_over_common_keys_over_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSPEC_CONFIG", str(file))
    monkeypatch.setenv("SPLITSPEC_NUM_DRAFT_TOKENS", "7")
    monkeypatch.setenv("SPLITSPEC_MAX_TOKENS", "100")
    settings = load_settings(CoordinatorSettings, ["--max-tokens", "200"])
    assert settings.max_tokens == 200
    assert settings.num_draft_tokens == 7
    assert settings.log_level == "error"
    assert settings.model == "from/file"
    assert settings.draft_patience == 2.0
    assert settings.decode_window == 3
    assert load_settings(DraftSettings).log_level == "warning"
    assert load_settings(DraftSettings).drafters == ("lookup", "layer_skip=/model")


def test_the_origin_of_each_value_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSPEC_MAX_TOKENS", "100")
    settings = explain_settings(CoordinatorSettings, ["--config", str(file), "--decode-window", "5"])
    assert [setting.name for setting in settings] == list(CoordinatorSettings.model_fields)
    shown = {setting.name: (setting.value, setting.origin) for setting in settings}
    assert shown["decode_window"] == ("5", "flag --decode-window")
    assert shown["max_tokens"] == ("100", "variable SPLITSPEC_MAX_TOKENS")
    assert shown["num_draft_tokens"] == ("6", f"file {file}")
    assert shown["model"] == ("from/file", f"file {file}")
    assert shown["draft_timeout_s"] == ("2.0", "default")
    assert shown["config"] == (str(file), "flag --config")
    drafters = {s.name: s.value for s in explain_settings(DraftSettings, ["--config", str(file)])}
    assert drafters["drafters"] == "lookup layer_skip=/model"


def test_the_flag_of_the_file_goes_over_its_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSPEC_CONFIG", "/does/not/exist")
    assert load_settings(TargetSettings, ["--config", str(file)]).model == "from/file"
    assert refusal(TargetSettings).startswith("--config (SPLITSPEC_CONFIG) is '/does/not/exist': ")


def test_settings_are_frozen() -> None:
    settings = load_settings(TargetSettings, ["--model", "m"])
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, "port", 1)  # noqa: B010  # mypy knows, too


def test_a_wrong_flag_or_variable_is_named_with_what_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(TargetSettings, "--model", "m", "--port", "70000") == (
        "--port (SPLITSPEC_PORT, port in the file) is '70000' by flag --port, "
        "expected less than or equal to 65535"
    )
    monkeypatch.setenv("SPLITSPEC_THREADS", "many")
    monkeypatch.setenv("SPLITSPEC_DTYPE", "int8")
    message = refusal(TargetSettings, "--model", "m")
    assert (
        "--threads (SPLITSPEC_THREADS, threads in the file) is 'many' by variable SPLITSPEC_THREADS"
        in message
    )
    assert "is 'int8' by variable SPLITSPEC_DTYPE, expected 'float32', 'bfloat16' or 'float16'" in message


def test_a_switch_is_read_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[target]\nmodel = 'm'\ndeterministic = false")
    assert load_settings(TargetSettings, ["--model", "m"]).deterministic
    assert not load_settings(TargetSettings, ["--config", str(path)]).deterministic
    assert not load_settings(TargetSettings, ["--model", "m", "--deterministic", "false"]).deterministic
    monkeypatch.setenv("SPLITSPEC_DETERMINISTIC", "false")
    assert not load_settings(TargetSettings, ["--model", "m"]).deterministic
    assert "is 'perhaps' by flag --deterministic, expected a valid boolean" in refusal(
        TargetSettings, "--model", "m", "--deterministic", "perhaps"
    )


def test_a_missing_setting_is_named() -> None:
    assert refusal(DraftSettings) == (
        "--drafters (SPLITSPEC_DRAFTERS, drafters in the file) is missing, expected a value"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modle = 'm'", "modle in FILE is unknown, expected model"),
        (
            "[target]\nmax_position = 1",
            "max_position in [target] of FILE is unknown, expected max_positions",
        ),
        ("[draft]\nmodel = 'm'", "model in [draft] of FILE is unknown, expected one of: advertise, "),
        ("[targets]\nport = 1", "targets in FILE is unknown, expected target"),
        ("drafters = ['lookup']", "drafters stands at the top of FILE, expected it in the section [draft]"),
        ("config = 'other.toml'", "config in FILE is unknown, expected "),
        ("target = 1", "target in FILE is 1, expected the section [target]"),
        ("model = ", "--config (SPLITSPEC_CONFIG) is 'FILE': Invalid value"),
        (
            "[target]\nport = '8'",
            "--port (SPLITSPEC_PORT, port in the file) is '8' by file FILE, expected a valid integer",
        ),
        (
            "[target]\nport = true",
            "--port (SPLITSPEC_PORT, port in the file) is True by file FILE, expected a valid integer",
        ),
        ("[target]\nport = -1", "is -1 by file FILE, expected greater than or equal to 0"),
        ("[target]\nmodel = 1979-05-27", "is datetime.date(1979, 5, 27) by file FILE, expected"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    message = refusal(TargetSettings, "--config", str(path), "--model", "m")
    assert expected in message.replace(str(path), "FILE")


def test_an_unknown_variable_is_an_error_but_those_of_other_roles_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITSPEC_DRAFTERS", "lookup")
    monkeypatch.setenv("SPLITSPEC_CACHE_DIR", "/tmp")
    assert load_settings(TargetSettings, ["--model", "m"]).model == "m"
    monkeypatch.setenv("SPLITSPEC_DRAFERS", "lookup")
    message = refusal(TargetSettings, "--model", "m")
    assert message == "the variable SPLITSPEC_DRAFERS is unknown, expected SPLITSPEC_DRAFTERS"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("redis://:hunter2@redis/0", "redis://***@redis/0"),
        ("rediss://user:hun/t@er2@redis/0", "rediss://***@redis/0"),
        ("redis://redis/0?password=hunter2&db=1", "redis://redis/0?password=***&db=1"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redacted(text) == shown
    monkeypatch.setenv("SPLITSPEC_REDIS_URL", text)
    assert shown in [setting.value for setting in explain_settings(TargetSettings, ["--model", "m"])]


def test_secrets_are_not_shown_by_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text('redis_url = ["redis://:hunter2@redis/0"]')
    message = refusal(TargetSettings, "--config", str(path), "--model", "m")
    assert "SPLITSPEC_REDIS_URL" in message
    assert "hunter2" not in message


def test_every_role_has_the_settings_of_telemetry() -> None:
    for cls in ROLES.values():
        assert {"trace_file", "metrics_port"} <= set(cls.model_fields)


def test_the_command_shows_one_role_with_its_flags(file: Path) -> None:
    result = run_config("coordinator", "--config", str(file), "--port", "7")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["port", "7", "flag", "--port"] in lines
    assert ["redis_url", "redis://***@redis:6379/0", "file", str(file)] in lines
    assert ["decode_window", "3", "default"] in lines
    assert "hunter2" not in result.output


def test_the_command_shows_all_roles_from_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSPEC_CONFIG", str(file))
    result = run_config()
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if line.startswith("[")] == [
        "[coordinator]",
        "[draft]",
        "[target]",
    ]


def test_the_command_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_config("target", "--port", "x", "--model", "m")
    assert result.exit_code == 2
    assert "--port (SPLITSPEC_PORT" in result.output
    assert run_config("redis").exit_code == 2


def test_attention_without_a_kernel_is_refused() -> None:
    expected = r"--attention .* is 'flex' by .*, expected auto or sdpa on the device cpu"
    for kind, needed in ((TargetSettings, "--model=m"), (DraftSettings, "--drafters=lookup")):
        with pytest.raises(ConfigError, match=expected):
            load_settings(kind, [needed, "--attention=flex"])
        assert load_settings(kind, [needed, "--attention=flex", "--device=cuda"]).attention == "flex"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_worker_that_listens_on_all_addresses_says_where_it_is_reached(host: str, role: str) -> None:
    """The coordinator isn't in the directory, and may listen where it likes."""
    needed = {"draft": ["--drafters=lookup"], "target": ["--model=m"]}[role]
    message = refusal(ROLES[role], *needed, f"--host={host}")
    shown = host.strip("[]")
    assert message == (
        "--advertise (SPLITSPEC_ADVERTISE, advertise in the file) is '' by default, expected host:port that "
        f"other processes reach this one by, as the host is {shown!r}"
    )
    load_settings(ROLES[role], [*needed, f"--host={host}", "--advertise=worker:50053"])
    load_settings(ROLES["coordinator"], ["--model=m", f"--host={host}"])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("worker-1.example:50053", "worker-1.example:50053"),
        ("10.0.0.7:1", "10.0.0.7:1"),
        ("[fd00::7]:50053", "[fd00::7]:50053"),
        ("fd00::7:50053", "[fd00::7]:50053"),
        ("::1:65535", "[::1]:65535"),
    ],
)
def test_an_advertised_address(given: str, taken: str) -> None:
    assert load_settings(CoordinatorSettings, ["--model=m", f"--advertise={given}"]).advertise == taken


@pytest.mark.parametrize(
    "given", ["worker", "worker:", ":50053", "worker:0", "worker:65536", "worker:http", "a:b:1", "::1"]
)
def test_an_address_that_is_none_is_refused(given: str) -> None:
    message = refusal(CoordinatorSettings, "--model=m", f"--advertise={given}")
    assert f"is {given!r} by flag --advertise, expected host:port" in message


@pytest.mark.parametrize("given", ["0.0.0.0:50053", "[::]:50053"])
def test_an_address_that_nobody_can_connect_to_is_refused(given: str) -> None:
    message = refusal(CoordinatorSettings, "--model=m", f"--advertise={given}")
    assert message.endswith("expected an address that other processes can connect to")
