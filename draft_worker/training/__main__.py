"""`splitspec train`: the commands and their flags. What they do is imported when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from splitspec.cli.app import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Data written by the target itself, and drafts trained on it.",
)

Model = Annotated[
    str,
    typer.Option(
        envvar="SPLITSPEC_MODEL", help="Target: hub id, directory, GGUF file, or demo.", show_default=False
    ),
]
Data = Annotated[
    list[Path],
    typer.Option(exists=True, dir_okay=False, help="Answers of the target; repeatable.", show_default=False),
]
Out = Annotated[
    Path, typer.Option(help="Directory of the draft; one that is there is resumed.", show_default=False)
]
Cache = Annotated[Path | None, typer.Option(help="Where the target's features are kept; else OUT/features.")]
Tokens = Annotated[
    int, typer.Option(min=1, help="Tokens of answers to train on, epochs and resumptions together.")
]
Batch = Annotated[int, typer.Option(min=1, help="Tokens of a batch, prompts and padding included.")]
Rate = Annotated[float, typer.Option(help="Learning rate; it falls over the last 30 % of the tokens.")]
MaxLength = Annotated[int, typer.Option(min=8, help="Longer texts are cut to so many tokens.")]
Device = Annotated[str, typer.Option(envvar="SPLITSPEC_DEVICE", help="cpu, cuda or cuda:N.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]


@app.command()
def data(
    model: Model,
    out: Annotated[Path, typer.Option(help="JSON lines; a file that is there grows.", show_default=False)],
    examples: Annotated[int, typer.Option(min=1, help="Lines that the file shall have in the end.")] = 4000,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Prompts, one a line, or JSON lines with prompt.",
            show_default="the target writes its own",
        ),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=4, help="Longest prompt of its own.")] = 128,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    parallel: Annotated[int, typer.Option(min=1, help="Texts in a batch.")] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(envvar="SPLITSPEC_DTYPE", help="Element type of the target's weights."),
    ] = "bfloat16",
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Have the target write prompts, and answer them at temperatures 0, 0.7 and 1.

    Ctrl-C loses nothing but unfinished answers; the same command goes on.
    """
    from draft_worker.training.commands import set_threads, write_data

    set_threads(threads)
    write_data(
        model,
        out,
        examples,
        prompts,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        parallel=parallel,
        dtype=dtype,
        device=device,
    )


@app.command()
def eagle(
    model: Model,
    data: Data,
    out: Out,
    features: Annotated[
        Literal["eagle3", "eagle"],
        typer.Option(help="eagle3 fuses a low, a middle and a high layer, eagle reads the last."),
    ] = "eagle3",
    draft_vocabulary: Annotated[
        int, typer.Option(min=1, help="Most frequent ids of the answers that the draft knows.")
    ] = 8192,
    depth: Annotated[int, typer.Option(min=1, help="Draft steps that each position is unrolled for.")] = 3,
    tokens: Tokens = 10_000_000,
    tokens_per_batch: Batch = 2048,
    learning_rate: Rate = 1e-3,
    max_length: MaxLength = 1024,
    cache: Cache = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train an EAGLE-3 or EAGLE draft. Ctrl-C writes a checkpoint; the same command goes on from there."""
    from draft_worker.training.commands import Options, set_threads, train_eagle

    set_threads(threads)
    options = Options(model, data, out, tokens, tokens_per_batch, learning_rate, max_length, cache, device)
    train_eagle(options, features, draft_vocabulary, depth)


@app.command()
def distill(
    model: Model,
    data: Data,
    out: Out,
    layers: Annotated[
        str, typer.Option(help="Layers of the target that the draft begins with, such as 0+1+2+27+28+29.")
    ],
    divergence: Annotated[
        Literal["forward_kl", "reverse_kl", "total_variation"],
        typer.Option(help="Distance from the target's distribution that is made small."),
    ] = "forward_kl",
    on_policy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of batches whose answers the draft itself writes.")
    ] = 0.0,
    tokens: Tokens = 10_000_000,
    tokens_per_batch: Batch = 2048,
    learning_rate: Rate = 3e-4,
    max_length: MaxLength = 1024,
    cache: Cache = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train an independent draft, for the drafter `model`: some of the target's layers, distilled."""
    from draft_worker.training.commands import Options, parse_layers, set_threads, train_distill

    set_threads(threads)
    options = Options(model, data, out, tokens, tokens_per_batch, learning_rate, max_length, cache, device)
    train_distill(options, parse_layers(layers), divergence, on_policy_share)


@app.command()
def curve(
    directory: Annotated[Path, typer.Argument(help="Of a training, running or ended.", show_default=False)],
) -> None:
    """Draw a training's learning curve as curve.png in its directory."""
    from draft_worker.training.curve import draw_curve

    typer.echo(draw_curve(directory))


run(app)
