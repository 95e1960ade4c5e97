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
