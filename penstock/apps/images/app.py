"""Image classification of scikit-image's photographs, seen from other angles and in other light."""

from penstock.apps.images.declare import image_application

SIDE = 96
# Files of each label: the one to train on, and a held-out photograph of the same subject if there is one.
PHOTOGRAPHS: dict[str, tuple[str, ...]] = {
    "animal/cat": ("chelsea.png",),
    "machine/motorcycle": ("motorcycle_left.png", "motorcycle_right.png"),
    "machine/rocket": ("rocket.jpg",),
    "medicine/cell": ("cell.png",),
    "medicine/retina": ("retina.jpg",),
    "medicine/tissue": ("ihc.png",),
    "person/astronaut": ("astronaut.png",),
    "person/cameraman": ("camera.png",),
    "sky/galaxies": ("hubble_deep_field.jpg",),
    "sky/moon": ("moon.png",),
    "surface/brick": ("brick.png",),
    "surface/grass": ("grass.png",),
    "surface/gravel": ("gravel.png",),
    "table/coffee": ("coffee.png",),
    "table/coins": ("coins.png",),
    "writing/handwriting": ("text.png",),
    "writing/print": ("page.png",),
}
LABELS = tuple(PHOTOGRAPHS)

app = image_application(
    name="images",
    description="Recognises the subjects of seventeen photographs.",
    labels=LABELS,
    side=SIDE,
    model="penstock.apps.images.model:network",
    recipe="penstock.apps.images.recipe:recipe",
)
