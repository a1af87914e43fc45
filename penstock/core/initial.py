"""The weights that a training starts from; serving and loading never look at them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.errors import ApplicationError

# Prefixes of sources that a library looks up by name.
LIBRARIES = ("timm", "torchvision")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedFrom:
    """The record of the weights that a training started from.

    Args:
        source: As the application names it.
        sha256: Of the file; of several files or of a library's weights, see `penstock.train.initial_weights`.
    """

    source: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Initial:
    """Weights that a training starts from, instead of random ones.

    Args:
        source: A safetensors file; a folder of Hugging Face with `model.safetensors`, or with the parts that
            `model.safetensors.index.json` lists; `"timm:NAME"` or `"torchvision:NAME"` for pretrained weights that the
            library looks up. A path is relative to the file that declares the application.
        skip: Patterns of names, such as `"head.*"`: of the network's tensors that keep their random values, and of the
            source's tensors that are not used. The patterns are those of the network's names, after `rename`.
        rename: Beginnings of the source's names, and their replacements: `{"encoder.": "body."}`; `{"": "body."}` puts
            `body.` before every name. The longest that fits counts.

    Raises:
        ApplicationError: A field is of another type.
    """

    source: str
    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        texts = isinstance(self.skip, tuple) and all(isinstance(each, str) for each in self.skip)
        renames = isinstance(self.rename, Mapping) and all(
            isinstance(each, str) for pair in self.rename.items() for each in pair
        )
        for name, good, fix in (
            ("source", isinstance(self.source, str) and self.source, "a file, a folder, 'timm:NAME' or so, as text"),
            ("skip", texts, "a tuple of patterns, such as ('head.*',)"),
            ("rename", renames, "a dictionary of beginnings of names, such as {'encoder.': 'body.'}"),
        ):
            if not good:
                raise ApplicationError(f"Initial has {name}={getattr(self, name)!r:.80}; it must be {fix}.")

    def renamed(self, name: str) -> str:
        """A name of the source as the network's."""
        fitting = [old for old in self.rename if name.startswith(old)]
        if not fitting:
            return name
        old = max(fitting, key=len)
        return self.rename[old] + name.removeprefix(old)
