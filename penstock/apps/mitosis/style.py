"""Styles of generated tissue: palettes, sizes and shapes of a laboratory and a scanner."""

from dataclasses import dataclass

Range = tuple[float, float]
Colour = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Ranges from which each slide, and each of its cells, is drawn.

    Args:
        hematoxylin: Optical density of the nuclear stain in red, green and blue, for each of the laboratories.
        eosin: That of the counterstain.
        stain_jitter: Largest change of each component, and of the strength of each stain, as a share.
        glass: Brightness of an empty slide in red, green and blue, 0 to 1.
        size: Size of the nuclei of a slide, relative to the usual one.
        exponent: Exponent of the superellipse of a nucleus; 2 is an ellipse.
        waviness: Amplitude of the outline of nuclei, as a share of the radius.
        hair: Roughness of the outline of a mitotic figure in pixels.
        grain_px: Correlation length of the chromatin's texture in pixels.
        bend: Curvature of a metaphase plate, as a share of its length.
        density: Nuclei on a million pixels.
        fibre: Stretching of the stroma's texture along one direction.
        blur_px: Standard deviation of the blur of a focused slide, in pixels.
        noise: Standard deviation of a pixel's noise, of 255.
    """

    hematoxylin: tuple[Colour, ...]
    eosin: tuple[Colour, ...]
    stain_jitter: float
    glass: Colour
    size: Range
    exponent: Range
    waviness: Range
    hair: Range
    grain_px: float
    bend: Range
    density: Range
    fibre: float
    blur_px: Range
    noise: Range


FIRST = Style(
    hematoxylin=((0.65, 0.70, 0.29), (0.55, 0.76, 0.36), (0.72, 0.62, 0.32)),
    eosin=((0.07, 0.99, 0.11), (0.12, 0.80, 0.25), (0.05, 0.70, 0.22)),
    stain_jitter=0.22,
    glass=(0.95, 0.94, 0.96),
    size=(0.88, 1.12),
    exponent=(1.9, 2.3),
    waviness=(0.01, 0.07),
    hair=(0.9, 2.2),
    grain_px=1.6,
    bend=(-0.12, 0.12),
    density=(700, 1500),
    fibre=3.0,
    blur_px=(0.5, 1.2),
    noise=(1.0, 4.0),
)
# Never trained on: other palettes, sizes and shapes.
SECOND = Style(
    hematoxylin=((0.80, 0.56, 0.22), (0.60, 0.60, 0.50)),
    eosin=((0.20, 0.88, 0.42), (0.02, 0.62, 0.40)),
    stain_jitter=0.15,
    glass=(0.98, 0.97, 0.92),
    size=(0.78, 0.95),
    exponent=(2.4, 3.2),
    waviness=(0.05, 0.12),
    hair=(0.7, 1.8),
    grain_px=2.4,
    bend=(-0.3, 0.3),
    density=(500, 1900),
    fibre=9.0,
    blur_px=(0.8, 1.5),
    noise=(2.0, 6.0),
)
