"""Pages that are generated from the project itself."""

from pathlib import Path
from typing import Any

from typer.main import get_command

from penstock.cli import build

DOCS = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Put every page of a folder where the navigation names the folder: `decisions/`."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the commands of `penstock` where the page asks for them."""
    if "<!-- commands -->" not in markdown:
        return markdown
    return markdown.replace("<!-- commands -->", "\n\n".join(_described(get_command(build()), "penstock")))


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(value) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_expanded(value) for value in entry]
    if entry.endswith("/"):
        return [f"{entry}{file.name}" for file in sorted((DOCS / entry).glob("*.md"))]
    return entry


def _described(command: Any, path: str) -> list[str]:
    """The help of a command and of those below it, as Markdown."""
    subcommands = {name: sub for name, sub in getattr(command, "commands", {}).items() if not sub.hidden}
    if subcommands:
        own = [] if path == "penstock" else [f"## `{path}`", command.help or ""]
        return own + [part for name, sub in subcommands.items() for part in _described(sub, f"{path} {name}")]
    names = [_name(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    parts = [f"## `{path}`", command.help or "", f"```text\n{' '.join([path, *names, '[OPTIONS]'])}\n```"]
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return [*parts, "\n".join(["| | | default |", "| --- | --- | --- |", *rows])] if rows else parts


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _row(parameter: Any) -> str:
    words = " ".join((parameter.help or "").split()).replace("\\[", "[").replace("|", "\\|")
    default = parameter.default
    shown = "" if default is None or parameter.required or callable(default) else f"`{default}`"
    return f"| `{_name(parameter)}` | {words} | {shown} |"
