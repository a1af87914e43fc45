"""`penstock train` and `penstock runs`."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
