"""`penstock serve`."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
