"""A group of commands that answers a wrong command with the most similar one."""

import click
import typer.core

from equipoise.settings import nearest


class CommandGroup(typer.core.TyperGroup):
    """Commands of the command line; Click's and Typer's own suggestions for a wrong name would both be printed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command with the name that comes first in the arguments, or fail with a suggestion."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"There is no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
