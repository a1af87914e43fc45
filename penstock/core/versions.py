"""Versions of the libraries that bundles, packs and measurements record."""

from importlib.metadata import PackageNotFoundError, version


def versions_of(*packages: str, missing: str = "from source") -> dict[str, str]:
    """Versions of some packages by their names; `missing` for one that is not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = missing
    return found
