"""Versions of the libraries that bundles, packs and measurements record."""

from importlib.metadata import PackageNotFoundError, version

from penstock.core.machine.version import __version__


def versions_of(*packages: str, missing: str = "from source") -> dict[str, str]:
    """Versions of some packages by their names; `missing` for one that is not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            # The distribution of that name is another project's.
            found[package] = __version__ if package == "penstock" else version(package)
        except PackageNotFoundError:
            found[package] = missing
    return found
