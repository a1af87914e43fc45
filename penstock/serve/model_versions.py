"""Versions of models to serve: the newest, all, or given ones."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from penstock.core.errors import ServeError

NEWEST, ALL = "newest", "all"
_POLICY = re.compile(r"(?:(?P<name>[^=]*)=)?(?P<versions>newest|all|[0-9]+(?:,[0-9]+)*)")


@final
@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Versions of one model.

    Args:
        versions: `NEWEST`, `ALL`, or the numbers.
    """

    versions: str | tuple[int, ...] = NEWEST

    @property
    def several(self) -> bool:
        """True if more than one version may be served."""
        return self.versions == ALL or (isinstance(self.versions, tuple) and len(self.versions) > 1)

    def chosen(self, there: Iterable[int]) -> list[int]:
        """Choose of the numbers that are there, in order.

        Raises:
            ServeError: One that must be served is not there.
        """
        found = sorted(there)
        if self.versions == ALL:
            return found
        if self.versions == NEWEST:
            return found[-1:]
        wanted = sorted(int(number) for number in self.versions)
        missing = [str(number) for number in wanted if number not in found]
        if missing:
            raise ServeError(
                f"version {', '.join(missing)} is not there; there is {', '.join(map(str, found)) or 'none'}."
            )
        return wanted


def parse_versions(texts: Iterable[str]) -> dict[str, VersionPolicy]:
    """Parse `newest`, `all`, `2`, `2,3`, each also as `NAME=...` for one model.

    Returns:
        The policies by name; under the empty name that of all other models.

    Raises:
        ServeError: A text is none of these, or a model has two.
    """
    policies: dict[str, VersionPolicy] = {}
    for text in texts:
        parsed = _POLICY.fullmatch(text)
        if parsed is None or parsed["name"] == "":
            raise ServeError(f"--versions is {text!r}; give newest, all, 2 or 2,3, or for one model NAME=2.")
        name, versions = parsed["name"] or "", parsed["versions"]
        if name in policies:
            raise ServeError(f"--versions is given twice for {name or 'all models'}; give it once.")
        numbers = () if versions in (NEWEST, ALL) else tuple(sorted({int(each) for each in versions.split(",")}))
        policies[name] = VersionPolicy(numbers or versions)
    return policies
