"""The command's table."""

import typer

from cli.budgets import budgets, history
from cli.common import clean
from cli.doctor import doctor
from cli.exits import USAGE
from cli.healthcheck import healthcheck
from cli.plan import plan
from cli.read import read
from cli.rehearse import rehearse
from cli.serve import serve
from cli.status import status
from cli.store import store_app
from cli.verify import verify
from cli.watch import watch
from kvaccord.errors import KvaccordError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One KV-cache plan for every rank, or one stated reason why not.",
)
for command in (
    serve,
    rehearse,
    plan,
    verify,
    read,
    status,
    watch,
    budgets,
    history,
    doctor,
    healthcheck,
):
    app.command()(command)
app.add_typer(store_app, name="store")


def run() -> int:
    """Run the command. Usage errors exit with 1: 2 says that a start failed, 3 no verdict."""
    try:
        return app(standalone_mode=False) or 0
    except typer.TyperException as error:
        typer.echo(f"kvaccord: {error.format_message()}", err=True)
        return USAGE
    except KvaccordError as fault:
        typer.echo(f"kvaccord: {clean(fault)}", err=True)
        return USAGE
    except (typer.Abort, KeyboardInterrupt):
        return USAGE
