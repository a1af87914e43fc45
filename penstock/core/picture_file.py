"""Files of pictures: the declared form of a `decode` of them."""

from dataclasses import dataclass
from typing import Any, final

from penstock.core.decode import Mode, decode_scaled
from penstock.core.errors import ApplicationError
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec

_CHANNELS = {"L": (), "RGB": (3,), "RGBA": (4,)}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFile:
    """A `decode` of picture files, as by `penstock.core.decode.decode_image`: uint8 `[H, W]`, `[H, W, 3 or 4]`.

    With `at_least`, a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which takes a fraction of the time: the
    server, `penstock.load` and trainings that read pictures by the `decode` do so alike. The answer is that of a
    picture that was resized by averaging before it is prepared. Packs and browsers decode whole pictures.

    Args:
        mode: `"L"` for grey, `"RGB"` for colour, `"RGBA"` for colour and 255, as in a browser's opaque canvas.
        size: Height and width to resize to; None where a `prepare` takes pictures of any size.
        max_pixels: Largest number of pixels of a file; a larger picture is refused before it is decoded.
        at_least: Height and width that a JPEG keeps if it is decoded at a fraction of its size; None for all pixels.
        tensor: Name of the input that it fills, where there are others beside it; it needs a `size`. A request has the
            file as a part of a form, or in base64 in JSON by name; a file alone where the others have defaults.

    Raises:
        ApplicationError: A field is of another kind, or `at_least` is below `size`.
    """

    mode: Mode
    size: tuple[int, int] | None = None
    max_pixels: int = 1 << 22
    at_least: tuple[int, int] | None = None
    tensor: str = ""

    def __post_init__(self) -> None:
        if self.mode not in _CHANNELS:
            raise ApplicationError(f"PictureFile has mode={self.mode!r}; choose 'L', 'RGB' or 'RGBA'.")
        if not isinstance(self.tensor, str) or (self.tensor and self.size is None):
            raise ApplicationError(
                f"PictureFile has tensor={self.tensor!r} and size={self.size}; a picture beside other inputs needs "
                f"their name and its height and width, such as tensor='picture', size=(224, 224)."
            )
        for name, given in (("size", self.size), ("at_least", self.at_least)):
            if given is not None and not _is_size(given):
                raise ApplicationError(
                    f"PictureFile has {name}={given!r}; give height and width as whole numbers above 0, such as "
                    f"(224, 224)."
                )
        if type(self.max_pixels) is not int or self.max_pixels < 1:
            raise ApplicationError(f"PictureFile has max_pixels={self.max_pixels!r}; give a whole number above 0.")
        if self.size and self.at_least and (self.at_least[0] < self.size[0] or self.at_least[1] < self.size[1]):
            raise ApplicationError(
                f"PictureFile has at_least={self.at_least} and size={self.size}; decoded pictures would be enlarged "
                f"again. Give at_least={self.size} or more."
            )

    def __call__(self, body: bytes, content_type: str) -> Any:
        """Decode a picture's file; beside other inputs, to a dictionary with its tensor alone.

        Raises:
            InvalidInput: Not a picture, or one that is cut short.
            TooLarge: More than `max_pixels`, or too many scans.
        """
        return {self.tensor: self.pixels(body)} if self.tensor else self.pixels(body)

    def pixels(self, body: bytes) -> Array:
        """Decode a picture's file to its array, see `__call__`."""
        return decode_scaled(body, mode=self.mode, size=self.size, max_pixels=self.max_pixels, at_least=self.at_least)

    @property
    def needs(self) -> str:
        """The array that it fills, for messages."""
        height, width = self.size or (None, None)
        shape = ", ".join("any" if size is None else str(size) for size in (height, width, *_CHANNELS[self.mode]))
        if self.tensor:
            return f"an input {self.tensor!r}, uint8[{shape}], beside others"
        return f"uint8[{shape}], as one input or as raw of its prepare"

    def fits(self, spec: ChunkSpec | RawSpec) -> bool:
        """Check that the array is one of an input, or of a prepare's raw arrays."""
        if self.tensor:
            spec = spec.by_name.get(self.tensor, spec) if isinstance(spec, RecordSpec) else RecordSpec(())
        if not isinstance(spec, TensorSpec | RawSpec) or spec.dtype != "uint8":
            return False
        sides, channels = spec.shape[:2], spec.shape[2:]
        return len(sides) == 2 and channels == _CHANNELS[self.mode] and sides in ((None, None), self.size)


def _is_size(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(type(side) is int and side > 0 for side in given)
