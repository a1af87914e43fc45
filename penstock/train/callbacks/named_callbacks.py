"""Callbacks by name, for recipes and `penstock train --callback`."""

from collections.abc import Callable, Sequence

from penstock.core.errors import TrainError
from penstock.train.callbacks.callback import Callback
from penstock.train.callbacks.logger import Logger
from penstock.train.callbacks.tensor_board import TensorBoard
from penstock.train.callbacks.trackers import MLflow, Trackio, WandB

# They only watch: a run may get one when it is resumed.
NAMED: dict[str, Callable[[], Callback]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_callbacks(given: object) -> None:
    """Check that callbacks are instances or names.

    Raises:
        TrainError: One is neither.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TrainError(f"the recipe has callbacks {given!r}; give a list, such as ['wandb'].")
    for each in given:
        if isinstance(each, str) and each not in NAMED:
            raise TrainError(f"there is no callback {each!r}; the names are {', '.join(NAMED)}.")
        if not isinstance(each, str | Callback):
            raise TrainError(
                f"the recipe has the callback {each!r}; give an instance of a subclass of Callback, or one of the "
                f"names {', '.join(NAMED)}."
            )


def ready_callbacks(given: Sequence[Callback | str], *, has_folder: bool) -> list[Callback]:
    """Make the callbacks of a training, before it starts; with a folder, `TensorBoard` is one of them.

    Args:
        given: Callbacks, or their names.
        has_folder: True if the training has a folder.

    Raises:
        TrainError: A logger's package is not installed.
    """
    made = [each for each in given if isinstance(each, Callback)]
    names = [each for each in given if isinstance(each, str)]
    for name in ["tensorboard", *names] if has_folder else names:
        named = NAMED[name]()
        if not any(type(each) is type(named) for each in made):
            made.append(named)
    for each in made:
        if isinstance(each, Logger):
            each.check()
    return made
