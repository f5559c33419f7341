"""The commands and their flags. What they do is imported when it is done, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from splitspec.cli import config
from splitspec.errors import ConfigError, InvalidRequestError, SplitspecError
from splitspec.types import MAX_NUM_DRAFT_TOKENS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact speculative decoding split across machines.",
)
serve = typer.Typer(no_args_is_help=True, help="Run one server; `serve ROLE --help` shows its flags.")
app.add_typer(serve, name="serve")
config.register(app)

out = Console(highlight=False)
err = Console(highlight=False, stderr=True)


def _coordinator(address: str) -> str:
    from splitspec.client.arguments import coordinator_address

    try:
        return coordinator_address(address)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None


Address = Annotated[
    str, typer.Argument(help="host:port of the coordinator.", show_default=False, callback=_coordinator)
]
RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="SPLITSPEC_REDIS_URL", help="A running Redis; without it one is started."),
]


def run(commands: typer.Typer = app) -> None:
    """Exit code 2 for a wrong flag or setting, 1 for another error; one sentence each, no traceback.

    128 + its number for a signal, with one line; 1 without a line when nobody reads standard output any more.
    """
    _take_any_text()
    try:
        commands()
    except SplitspecError as error:
        _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:  # the file, directory or device is the user's
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}", 1)
    except SystemExit as ended:
        if ended.code in _SIGNALS:
            err.print(_SIGNALS[ended.code])
        _let_go(sys.stdout)
        raise


_SIGNALS = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}


def _fail(reason: str, code: int) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(reason)}", soft_wrap=not err.is_terminal)
    _let_go(sys.stdout)
    sys.exit(code)


def _take_any_text() -> None:
    """What a terminal can't show is written as an escape; input that isn't text is refused where it is used.

    A stream that was closed before the start is None.
    """
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _let_go(stream: TextIO | None) -> None:
    """Write what is left. What can't be written is dropped, or the interpreter's end would report it."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _module(module: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        # This very process becomes the module's, so that signals and exit codes are its own.
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *context.args])

    return command


for _role, _name in (
    ("coordinator", "coordinator"),
    ("draft", "draft_worker"),
    ("target", "target_worker"),
):
    serve.command(
        _role,
        help=f"Run a {_name.replace('_', ' ')}; all flags are its own.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_module(_name))

app.command(
    "train",
    help="Train drafts, on data that the target writes itself; `train COMMAND --help` shows its flags.",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(_module("draft_worker.training"))


@app.command()
def up(
    model: Annotated[
        str,
        typer.Option(
            envvar="SPLITSPEC_MODEL", help="Target model: hub id, directory or GGUF file.", show_default=False
        ),
    ],
    drafters: Annotated[
        str,
        typer.Option(
            envvar="SPLITSPEC_DRAFTERS", help="Drafters, by spaces: NAME[=CHECKPOINT][,key=value...]."
        ),
    ] = "lookup",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(envvar="SPLITSPEC_DTYPE", help="Element type of all weights."),
    ] = "float32",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The coordinator's; 0 takes a free one.")
    ] = 50051,
    redis_url: RedisUrl = None,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of each worker's model; 0 leaves torch's choice.")
    ] = 0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Where the logs go; else a temporary directory.")
    ] = None,
) -> None:
    """Run Redis, target worker, draft worker and coordinator on this machine until Ctrl-C or SIGTERM.

    In the background of a script only SIGTERM ends it: shells let such commands ignore SIGINT.
    Prints the coordinator's address. Other settings of the servers are taken from SPLITSPEC_* variables.
    """
    from splitspec.cli.stack import Stack
    from splitspec.cli.up import keep_up

    worker_args = [f"--threads={threads}"]
    stack = Stack(
        model=model,
        drafters=drafters.split(),
        dtype=dtype,
        port=port,
        target_args=worker_args,
        draft_args=worker_args,
        redis_url=redis_url,
        log_dir=log_dir,
    )
    _run(keep_up(stack, out, err))


@app.command()
def generate(
    address: Address,
    prompt: Annotated[list[str], typer.Argument(help="The prompt; words are joined.", show_default=False)],
    chat: Annotated[
        bool,
        typer.Option("--chat/--text", help="A user's message in the model's template, or text as it is."),
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least so probable, beside the first.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divides logits of tokens seen.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off the logits of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=NUMBER, added to the id's logit; repeatable.")
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None, typer.Option("--allowed-token-id", help="The only ids that may come; repeatable.")
    ] = None,
    banned_token_ids: Annotated[
        list[int] | None, typer.Option("--banned-token-id", help="Id that never comes; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, with so many top tokens; see them with --json.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes the output repeatable.", show_default="random")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; repeatable.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Token id that ends the output; repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    speculate: Annotated[bool, typer.Option(help="Speculate, or decode plainly.")] = True,
    num_draft_tokens: Annotated[
        int | None, typer.Option("--num-draft-tokens", "-k", help=f"0 to {MAX_NUM_DRAFT_TOKENS} per round.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="Name of the drafter.", show_default="the server's")] = "",
    rule: Annotated[
        Literal["greedy", "token", "block", "shared_noise"] | None,
        typer.Option(help="Verification rule.", show_default="by temperature and seed"),
    ] = None,
    session_id: Annotated[str, typer.Option(help="Conversation to continue or begin.")] = "",
    request_id: Annotated[str, typer.Option(help="Makes a repeated call idempotent.")] = "",
    resume_offset: Annotated[int, typer.Option(help="Tokens of that request that are already here.")] = 0,
    tenant: Annotated[str, typer.Option(help="Nothing is shared across tenants.")] = "",
    one_token_per_chunk: Annotated[bool, typer.Option("--one-token-per-chunk", help="As it says.")] = False,
    timeout: Annotated[float, typer.Option(help="Deadline in seconds.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object at the end instead of text as it comes.")
    ] = False,
) -> None:
    """Generate text, with each token in the colour of its origin when standard output is a terminal."""
    from splitspec.cli.generate import stream
    from splitspec.client import GenerateOptions, Message
    from splitspec.types import Rule

    words = " ".join(prompt)
    options = GenerateOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(pair) for pair in logit_bias or ()),
        allowed_token_ids=allowed_token_ids or (),
        banned_token_ids=banned_token_ids or (),
        logprobs=logprobs,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or (),
        stop_token_ids=stop_token_ids or (),
        ignore_eos=ignore_eos,
        speculate=speculate,
        num_draft_tokens=num_draft_tokens,
        drafter=drafter,
        rule=Rule[rule.upper()] if rule else None,
        session_id=session_id,
        request_id=request_id,
        resume_offset=resume_offset,
        tenant=tenant,
        one_token_per_chunk=one_token_per_chunk,
        timeout=timeout,
    )
    _run(stream(address, [Message("user", words)] if chat else words, options, as_json, out, err))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias is {text!r}, expected ID=NUMBER", field="logit_bias") from None


@app.command()
def chat(
    address: Address,
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    drafter: Annotated[str, typer.Option(help="Name of the drafter.", show_default="the server's")] = "",
) -> None:
    """Talk to the model, line by line, in one session: each turn feeds only the new tokens."""
    from splitspec.cli.chat import converse
    from splitspec.client import GenerateOptions

    options = GenerateOptions(temperature=temperature, max_tokens=max_tokens, drafter=drafter)
    _run(converse(address, system, options, out, err))


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(help="host:port of a server.", show_default=False, callback=_coordinator)
    ],
    service: Annotated[
        str, typer.Argument(help="Full name of a service; without it: whether the process lives.")
    ] = "",
) -> None:
    """Ask a server for its health; exit code 0 when it serves."""
    from splitspec.cli.health import health_status

    status = asyncio.run(health_status(address, service))
    out.print(status)
    raise typer.Exit(status != "SERVING")


@app.command()
def fetch_demo_model() -> None:
    """Fetch the demo model once (SmolLM2-135M-Instruct, about 90 MB) and print its directory."""
    from splitspec.cli.steps import Steps
    from splitspec.models import fetch_demo_model

    with Steps(err) as steps:
        path = fetch_demo_model(
            lambda line: steps.update("demo model", line.removeprefix("demo model: "), False)
        )
        steps.update("demo model", "ready", True)
    out.print(str(path), soft_wrap=True)


@app.command()
def simulate(
    directory: Annotated[Path, typer.Argument(help="Where the model goes.", show_default=False)],
    vocabulary: Annotated[int, typer.Option(help="Tokens; the same for target and draft.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the target's table; the same for target and draft.")] = 1,
    acceptance: Annotated[
        float, typer.Option(help="Of a draft's tokens by that target, 0.35 to 1; 1 is the target itself.")
    ] = 1.0,
    pass_ms: Annotated[float, typer.Option(help="Milliseconds of a pass.")] = 0.0,
    position_ms: Annotated[float, typer.Option(help="And for each position in it.")] = 0.0,
    max_context: Annotated[int, typer.Option(help="Most tokens of a text.")] = 65536,
) -> None:
    """Write a simulated model, which `--model` and `--drafters model=DIRECTORY` take like any other.

    Its passes sleep: for experiments with times and acceptance that are chosen. Done again for a model that
    runs, it changes acceptance and times from the next pass on.
    """
    from splitspec.engine.simulated import SimulatedConfig

    SimulatedConfig(vocabulary, seed, acceptance, pass_ms, position_ms, max_context).save(directory)
    out.print(str(directory), soft_wrap=True)


@app.command()
def demo(redis_url: RedisUrl = None) -> None:
    """A real model through all processes on this machine, plain and speculative, with a table at the end."""
    from splitspec.cli.demo import play

    _run(play(redis_url, out))


def _run(command: Coroutine[Any, Any, None]) -> None:
    """Run a command; SIGTERM cancels it as Ctrl-C does, so that what it started is stopped."""

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio.run makes one"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await command

    try:
        asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
