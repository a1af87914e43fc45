"""What a user writes: one frozen record from which training, serving and carrying all start."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.core.errors import ApplicationError
from penstock.core.spec import Array, TensorSpec

Decode = Callable[[bytes, str], Array]
Reply = Callable[[Array], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """A network and what it is for, declared once.

    `model` and `recipe` may be objects or import paths: `":Net"` (in the application's own module) or `"pkg.mod:Net"`.
    With paths, reading the application loads no torch.

    Args:
        name: What it is called in URLs: letters, digits, `-` and `_`.
        input: One chunk as `decode` gives it and the model takes it, raw: before any numeric preparation.
        output: One chunk as the model gives it.
        model: Makes the `torch.nn.Module`, without arguments. Its `forward` takes a batch of raw inputs, shaped
            `[B, *input.shape]`, and is what training calls; where it has `predict`, that is what is served and
            recorded (logits, say, become probabilities there); otherwise `forward` is.
        decode: Turns a request's body and content type into one raw array of `input`. Bytes to numbers, nothing numeric
            beyond that. Raw bytes and JSON arrays of the spec need no `decode`.
        reply: Turns one output into what the client gets as JSON. By default the output as nested lists.
        recipe: How it is trained: a `penstock.Recipe`, or a function that makes one.
        accepts: The content types that `decode` reads, such as `("image/png",)`.
        max_body_bytes: A larger request body is refused with 413.
        chunks: How many chunks of one client may wait in its slot; 1 for one-shot requests.
        description: One sentence for people.

    Raises:
        ApplicationError: A name that cannot stand in a URL, or a field out of range.
    """

    name: str
    input: TensorSpec
    output: TensorSpec
    model: Callable[[], Any] | str
    decode: Decode | None = None
    reply: Reply | None = None
    recipe: Any = None
    accepts: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 23
    chunks: int = 1
    description: str = ""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "-_") for c in self.name):
            raise ApplicationError(f"Application has name {self.name!r}; use letters, digits, '-' and '_'.")
        if self.chunks < 1:
            raise ApplicationError(f"Application {self.name!r} has chunks={self.chunks}; it must be at least 1.")
        if self.max_body_bytes < self.input.nbytes:
            raise ApplicationError(
                f"Application {self.name!r} has max_body_bytes={self.max_body_bytes:,}, less than one chunk "
                f"of {self.input.describe()} ({self.input.nbytes:,} bytes)."
            )
        if self.decode is not None and not self.accepts:
            raise ApplicationError(
                f"Application {self.name!r} has a decode but accepts nothing; name its content types in `accepts`."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundApplication:
    """An application and where it was found.

    Args:
        application: The record.
        module: The module that declares it, in which `":Net"` is looked up.
        reference: What finds it again: `"digits"`, `"pkg.mod:attr"` or `"/path/app.py:attr"`.
    """

    application: Application
    module: ModuleType
    reference: str

    def model(self) -> Any:
        """A new network (a `torch.nn.Module`) with untrained weights."""
        return self._made(self.application.model, "model")

    def recipe(self) -> Any:
        """The training recipe.

        Raises:
            ApplicationError: The application has none.
        """
        if self.application.recipe is None:
            raise ApplicationError(f"Application {self.application.name!r} has no recipe; give it one to train it.")
        return self._made(self.application.recipe, "recipe")

    def source_sha256(self) -> dict[str, str]:
        """The SHA-256 of each source file of the application, by its path beside the declaring file.

        Sources are the declaring file and, of the modules that `model` and `recipe` name, those in its folder or below.
        """
        home = Path(self.module.__file__ or "").resolve()
        files = {home}
        for field in (self.application.model, self.application.recipe):
            file = self._file_of(field)
            if file is not None:
                files.add(Path(file).resolve())
        return {
            file.relative_to(home.parent).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(files)
            if file.is_relative_to(home.parent)
        }

    def _made(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            value = self._looked_up(value, field)
        return value() if callable(value) else value

    def _looked_up(self, path: str, field: str) -> Any:
        module_name, _, attribute = path.partition(":")
        try:
            module = importlib.import_module(module_name) if module_name else self.module
            return getattr(module, attribute)
        except (ImportError, AttributeError) as error:
            raise ApplicationError(
                f"Application {self.application.name!r} has {field} {path!r}, which cannot be imported ({error}); "
                f"write ':Name' for this file or 'package.module:Name'."
            ) from error

    def _file_of(self, value: Any) -> str | None:
        if not isinstance(value, str):
            module = sys.modules.get(getattr(value, "__module__", ""))
            return getattr(module, "__file__", None)
        module_name = value.partition(":")[0]
        if not module_name:
            return self.module.__file__
        spec = importlib.util.find_spec(module_name)
        return spec.origin if spec else None


def find_application(reference: str) -> FoundApplication:
    """The application behind a name in penstock.apps, an import path, or a user's own file.

    Args:
        reference: `"digits"`, `"package.module"`, `"package.module:attr"`, `"path/app.py"` or `"path/app.py:attr"`; the
            attribute is `app` where it is left out.

    Raises:
        ApplicationError: Nothing is there, it does not import, or it is not an `Application`.
    """
    path, _, attribute = reference.partition(":")
    attribute = attribute or "app"
    if path.endswith(".py") or "/" in path:
        module = _module_from_file(Path(path))
        path = str(Path(path).resolve())
    else:
        module = _module_from_name(path)
    found = getattr(module, attribute, None)
    if not isinstance(found, Application):
        raise ApplicationError(f"{path} has no Application called {attribute!r}; write '{path}:name' for another.")
    short = path if attribute == "app" else f"{path}:{attribute}"
    return FoundApplication(application=found, module=module, reference=short)


def application_names() -> list[str]:
    """The names of the applications that come with penstock."""
    folder = Path(__file__).parent.parent / "apps"
    return sorted(file.parent.name for file in folder.glob("*/app.py"))


def _module_from_name(name: str) -> ModuleType:
    dotted = f"penstock.apps.{name}.app" if name in application_names() else name
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not dotted.startswith(error.name):
            raise ApplicationError(f"Application {name!r} needs the module {error.name!r}; install it.") from error
        raise ApplicationError(
            f"There is no application {name!r}; use one of {', '.join(application_names())}, "
            f"an import path or a path to an app.py."
        ) from error
    except (ValueError, TypeError) as error:
        raise ApplicationError(f"{name!r} is not an application's name, import path or file.") from error


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ApplicationError(f"There is no file {file}; give the path of an app.py.")
    name = f"penstock_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ApplicationError(f"{file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # As when Python runs a file: the modules beside it can be imported.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ApplicationError(f"{file} does not import: {type(error).__name__}: {error}") from error
    return module


def describe(application: Application) -> dict[str, Any]:
    """What a client may know of an application, as JSON values."""
    return {
        "name": application.name,
        "description": application.description,
        "input": application.input.to_json(),
        "output": application.output.to_json(),
        "accepts": [*application.accepts, "application/json", "application/octet-stream"],
        "max_body_bytes": application.max_body_bytes,
    }


def reply_of(application: Application) -> Reply:
    """The application's `reply`, or the default: the output as nested lists."""
    return application.reply or (lambda output: output.tolist())
