"""Commands that answer a wrong command or option with what was probably meant."""

import difflib

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


class SettingsCommand(typer.core.TyperCommand):
    """A command with `--set`, which explains that settings such as `rounds` are not options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            options = [option for parameter in self.params for option in parameter.opts]
            if difflib.get_close_matches(error.option_name, options, cutoff=0.75):
                raise
            setting = error.option_name.lstrip("-").replace("-", "_")
            ctx.fail(
                f"No such option: {error.option_name}; settings are changed with --set, as in --set {setting}=VALUE"
            )
