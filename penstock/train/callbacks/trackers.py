"""Loggers for Weights & Biases, MLflow and Trackio. Their packages are imported when the training starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from penstock.train.callbacks.callback import Started
from penstock.train.callbacks.logger import EVERY_STEPS, Logger, Status


@final
class WandB(Logger):
    """Log to Weights & Biases. A resumed training goes on with the same run of it.

    Args:
        project: The project; by default the application's name.
        name: Name of the run; by default that of the folder.
        mode: `"online"`, or `"offline"` to write files for `wandb sync`; by default `WANDB_MODE`.
        every_steps: The loss of each step whose number is a multiple of this is logged too.
    """

    package = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        every_steps: int = EVERY_STEPS,
    ) -> None:
        super().__init__(every_steps)
        self._project, self._name, self._mode = project, name, mode
        self._run: Any = None

    def open(self, package: Any, event: Started) -> None:
        """Start the run, or resume it by its id."""
        known = _known_id(event, self.package)
        self._run = package.init(
            project=self._project or event.name,
            name=self._name or _name_of(event),
            dir=None if event.folder is None else str(event.folder),
            config=dict(event.settings),
            mode=self._mode,
            id=known,
            resume=None if known is None else "allow",
        )
        _keep_id(event, self.package, self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


@final
class MLflow(Logger):
    """Log to MLflow. A resumed training goes on with the same run of it.

    Args:
        experiment: The experiment; by default `MLFLOW_EXPERIMENT_NAME`, or MLflow's default one.
        name: Name of the run; by default that of the folder.
        tracking_uri: The server or a local store; by default `MLFLOW_TRACKING_URI`.
        every_steps: The loss of each step whose number is a multiple of this is logged too.
    """

    package = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        every_steps: int = EVERY_STEPS,
    ) -> None:
        super().__init__(every_steps)
        self._experiment, self._name, self._tracking_uri = experiment, name, tracking_uri
        self._mlflow: Any = None

    def open(self, package: Any, event: Started) -> None:
        """Start the run, or resume it by its id."""
        self._mlflow = package
        if self._tracking_uri is not None:
            package.set_tracking_uri(self._tracking_uri)
        if self._experiment is not None:
            package.set_experiment(self._experiment)
        known = _known_id(event, self.package)
        run = package.start_run(run_id=known, run_name=self._name or _name_of(event))
        _keep_id(event, self.package, run.info.run_id)
        if known is None:
            # Parameters of a run cannot change.
            package.log_params({name: str(value) for name, value in event.settings.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, status: Status) -> None:
        """End the run."""
        self._mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status])


@final
class Trackio(Logger):
    """Log to Trackio. A resumed training goes on with the run of the same name.

    Args:
        project: The project; by default the application's name.
        name: Name of the run; by default that of the folder.
        space_id: A Hugging Face Space to log to; by default a local database.
        every_steps: The loss of each step whose number is a multiple of this is logged too.
    """

    package = "trackio"

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        space_id: str | None = None,
        every_steps: int = EVERY_STEPS,
    ) -> None:
        super().__init__(every_steps)
        self._project, self._name, self._space_id = project, name, space_id
        self._run: Any = None

    def open(self, package: Any, event: Started) -> None:
        """Start the run, or resume it by its name."""
        self._run = package.init(
            project=self._project or event.name,
            name=_known_id(event, self.package) or self._name or _name_of(event),
            space_id=self._space_id,
            config=dict(event.settings),
            resume="allow" if event.step else "never",
            embed=False,
        )
        _keep_id(event, self.package, self._run.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        """Finish the run."""
        self._run.finish()


def _name_of(event: Started) -> str | None:
    return None if event.folder is None else event.folder.resolve().name


def _id_file(folder: Path, package: str) -> Path:
    return folder / f"{package}-id.txt"


def _known_id(event: Started, package: str) -> str | None:
    """The id that this training has in the other program, if it is resumed."""
    if event.folder is None or event.step == 0:
        return None
    file = _id_file(event.folder, package)
    return file.read_text().strip() if file.exists() else None


def _keep_id(event: Started, package: str, known: str) -> None:
    if event.folder is not None:
        _id_file(event.folder, package).write_text(f"{known}\n")
