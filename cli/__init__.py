"""The `kvaccord` command: thin, it calls the rooms above."""

import sys


def main() -> None:
    """Entry point of the `kvaccord` command. Exit codes: docs/operations.md."""
    try:
        from cli.app import run
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"kvaccord: the command needs {error.name}; pip install 'kvaccord[server]'"
        ) from error
    sys.exit(run())
