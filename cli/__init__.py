"""The `kvaccord` command: thin, it calls the rooms above."""


def main() -> None:
    """Entry point of the `kvaccord` command."""
    try:
        from cli.app import app
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"kvaccord: the command needs {error.name}; pip install 'kvaccord[server]'"
        ) from error
    app()
