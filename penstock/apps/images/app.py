"""Things in pictures: the photographs of scikit-image, each known again from another angle, in another light."""

from penstock.apps.images.declare import image_application
from penstock.apps.images.photographs import LABELS, SIDE

app = image_application(
    name="images",
    description="Knows the things of seventeen photographs again.",
    labels=LABELS,
    side=SIDE,
    model="penstock.apps.images.model:network",
    recipe="penstock.apps.images.recipe:recipe",
)
