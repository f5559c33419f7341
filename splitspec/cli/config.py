"""`splitspec config`: the settings in effect, each with where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from splitspec.config import ROLES, Setting, explain_settings
from splitspec.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("config", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(config)


def config(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="coordinator, draft or target; without one: all.")] = "",
) -> None:
    """Show the settings in effect and where each comes from, given the flags of `splitspec serve ROLE`."""
    if role and role not in ROLES:
        raise typer.BadParameter(f"{role!r} is unknown, expected one of: {', '.join(ROLES)}")
    failed = False
    for name in [role] if role else ROLES:
        typer.echo(f"[{name}]")
        try:
            typer.echo(_table(explain_settings(ROLES[name], context.args)))
        except ConfigError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(2)


def _table(settings: list[Setting]) -> str:
    names = max(len(setting.name) for setting in settings)
    values = max(len(setting.value) for setting in settings)
    return "\n".join(f"{s.name:{names}}  {s.value:{values}}  {s.origin}" for s in settings) + "\n"
