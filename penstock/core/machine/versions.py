"""Versions of installed packages: those that bundles, packs and measurements record, and that name cached content."""

import re
from importlib.metadata import PackageNotFoundError, distribution

from penstock.core.machine.version import __version__

_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)


def installed_version(package: str) -> str:
    """Return the version of an installed package, as `importlib.metadata.version` does.

    That function parses the package's whole description; this one reads the line of the version.

    Raises:
        PackageNotFoundError: It is not installed.
    """
    found = distribution(package)
    line = _VERSION.search(found.read_text("METADATA") or "")
    return found.version if line is None else line[1]


def versions_of(*packages: str, missing: str = "from source") -> dict[str, str]:
    """Versions of some packages by their names; `missing` for one that is not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            # The distribution of that name is another project's.
            found[package] = __version__ if package == "penstock" else installed_version(package)
        except PackageNotFoundError:
            found[package] = missing
    return found
