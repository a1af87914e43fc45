"""Image classification of scikit-image's photographs, seen from other angles and in other light."""

from penstock.apps.images.declare import image_application
from penstock.apps.images.photographs import LABELS, SIDE

app = image_application(
    name="images",
    description="Recognises the subjects of seventeen photographs.",
    labels=LABELS,
    side=SIDE,
    model="penstock.apps.images.model:network",
    recipe="penstock.apps.images.recipe:recipe",
)
