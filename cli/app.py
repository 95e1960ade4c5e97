"""The command's table."""

import typer

from cli.healthcheck import healthcheck
from cli.rehearse import rehearse
from cli.serve import serve

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One KV-cache plan for every rank, or one stated reason why not.",
)
app.command()(serve)
app.command()(rehearse)
app.command()(healthcheck)


def run() -> int:
    """Run the command. Usage errors exit with 1: 2 says that a start failed, 3 no verdict."""
    try:
        return app(standalone_mode=False) or 0
    except typer.TyperException as error:
        typer.echo(f"kvaccord: {error.format_message()}", err=True)
        return 1
    except typer.Abort:
        return 1
