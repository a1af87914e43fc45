"""What a user writes: one frozen record from which training, serving and carrying all start."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.core.errors import ApplicationError
from penstock.core.live import WAV, Live, is_sound
from penstock.core.prepare import Prepare
from penstock.core.recognition import Recognition
from penstock.core.sources import modules_beside, refuse_strangers
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
        decode: Turns a request's body and content type into one raw array of `input`, or of `prepare.raw` where that is
            declared. Bytes to numbers, nothing numeric beyond that. Raw bytes and JSON arrays of `input` need no
            `decode`.
        prepare: Where raw arrays vary in size (photos): makes one chunk of `input` from what `decode` gave. It is
            exported with the bundle, and the same graph runs everywhere.
        recognition: What is said of a classifier's probabilities, and how that is steadied over a video; the labels are
            those of `output`.
        reply: Turns one output into what the client gets as JSON. By default the output as nested lists.
        recipe: How it is trained: a `penstock.Recipe`, or a function that makes one.
        accepts: The content types that `decode` reads, such as `("image/png",)`.
        max_body_bytes: A larger request body is refused with 413.
        chunks: How many chunks of one client may wait in its slot; 1 for one-shot requests, and 2 at least for live
            streams, of which a chunk comes while the last one is worked on.
        live: Where the input is a chunk of a live signal; None for one-shot requests.
        description: One sentence for people.

    Raises:
        ApplicationError: A name that cannot stand in a URL, or a field out of range.
    """

    name: str
    input: TensorSpec
    output: TensorSpec
    model: Callable[[], Any] | str
    decode: Decode | None = None
    prepare: Prepare | None = None
    recognition: Recognition | None = None
    reply: Reply | None = None
    recipe: Any = None
    accepts: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 23
    chunks: int = 1
    live: Live | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _stands_in_a_url(self.name):
            raise ApplicationError(f"Application has name {self.name!r}; use letters, digits, '-' and '_'.")
        self._check_fields()
        if self.max_body_bytes < self.input.nbytes:
            raise ApplicationError(
                f"Application {self.name!r} has max_body_bytes={self.max_body_bytes:,}, less than one chunk "
                f"of {self.input.describe()} ({self.input.nbytes:,} bytes)."
            )
        if self.live is not None:
            self._check_live()
        if self.decode is not None and not self.accepts:
            raise ApplicationError(
                f"Application {self.name!r} has a decode but accepts nothing; name its content types in `accepts`."
            )
        if self.prepare is not None and (self.decode is None or self.live is not None):
            wrong = "no decode, which would give the raw arrays" if self.decode is None else "a live signal as well"
            raise ApplicationError(f"Application {self.name!r} has a prepare and {wrong}; leave one of them out.")
        if self.recognition is not None and self.recognition.labels != self.output.labels:
            raise ApplicationError(
                f"Application {self.name!r} has a recognition whose labels are not those of its output; give both the "
                f"same."
            )

    def _check_live(self) -> None:
        for name, spec in (("input", self.input), ("output", self.output)):
            if not spec.shape:
                raise ApplicationError(
                    f"Application {self.name!r} is live and has {name} {spec.describe()}; a chunk's frames come first."
                )
        if self.chunks < 2:
            raise ApplicationError(
                f"Application {self.name!r} is live and has chunks={self.chunks}; give it 2 at least, such as 8."
            )
        if self.reply is not None:
            raise ApplicationError(
                f"Application {self.name!r} is live and has a reply; give `Live` its `events` instead."
            )

    def _check_fields(self) -> None:
        types = isinstance(self.accepts, tuple) and all(map(_is_content_type, self.accepts))
        made = isinstance(self.model, str) or (callable(self.model) and not hasattr(self.model, "state_dict"))
        made = made or isinstance(self.model, type)
        for name, good, fix in (
            ("input", isinstance(self.input, TensorSpec), "a TensorSpec"),
            ("output", isinstance(self.output, TensorSpec), "a TensorSpec"),
            ("model", made, "a class or function that makes the network, or its import path, not the network itself"),
            ("decode", self.decode is None or callable(self.decode), "a function of a request's body and content type"),
            ("reply", self.reply is None or callable(self.reply), "a function of one output"),
            ("accepts", types, "a tuple of content types in lower case, such as ('image/png',)"),
            ("chunks", type(self.chunks) is int and self.chunks >= 1, "a whole number, at least 1"),
            ("live", self.live is None or isinstance(self.live, Live), "a Live, for streams"),
            ("prepare", self.prepare is None or isinstance(self.prepare, Prepare), "a Prepare"),
            ("recognition", self.recognition is None or isinstance(self.recognition, Recognition), "a Recognition"),
            ("max_body_bytes", type(self.max_body_bytes) is int, "a whole number of bytes"),
        ):
            if not good:
                value = " ".join(repr(getattr(self, name)).split())[:80]
                raise ApplicationError(f"Application {self.name!r} has {name}={value}; it must be {fix}.")


def _stands_in_a_url(name: str) -> bool:
    return name != "" and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)


def _is_content_type(value: object) -> bool:
    return isinstance(value, str) and value.count("/") == 1 and value == value.lower().strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundApplication:
    """An application, where it was found, and what its sources were then.

    Args:
        application: The record.
        module: The module that declares it, in which `":Net"` is looked up.
        reference: What finds it again: `"digits"`, `"pkg.mod:attr"` or `"/path/app.py:attr"`.
    """

    application: Application
    module: ModuleType
    reference: str
    _modules: dict[str, Path] = field(init=False, repr=False, compare=False)
    _sha256: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        file = getattr(self.module, "__file__", None)
        modules: dict[str, Path] = {}
        sha256: dict[str, str] = {}
        if file is not None:
            home = Path(file).resolve()
            prepare = self.application.prepare
            paths = (self.application.model, self.application.recipe, None if prepare is None else prepare.module)
            roots = [path.partition(":")[0] for path in paths if isinstance(path, str)]
            modules = modules_beside(home, self.module.__package__ or "", roots)
            # Now, not when it is asked for: what is edited during a long training was not what trained.
            for source in sorted({home, *modules.values()}):
                if source.is_relative_to(home.parent):
                    sha256[source.relative_to(home.parent).as_posix()] = _digest(source)
        object.__setattr__(self, "_modules", modules)
        object.__setattr__(self, "_sha256", sha256)

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

    def prepare(self) -> Any:
        """A new module (a `torch.nn.Module`) that makes one chunk of one raw array.

        Raises:
            ApplicationError: The application has none.
        """
        if self.application.prepare is None:
            raise ApplicationError(f"Application {self.application.name!r} has no prepare; its input is of one size.")
        return self._made(self.application.prepare.module, "prepare")

    def source_sha256(self) -> dict[str, str]:
        """The SHA-256 of each source file, as it was when the application was found, by its path beside the first.

        Sources are the declaring file and every module in its folder or below that it imports, directly or not, or that
        `model`, `recipe` or `prepare` name.
        """
        return dict(self._sha256)

    def _made(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            value = self._looked_up(value, field)
        if not callable(value):
            return value
        try:
            return value()
        except TypeError as error:
            raise ApplicationError(
                f"The {field} of application {self.application.name!r} cannot be made ({error}); it is called without "
                f"arguments."
            ) from error

    def _looked_up(self, path: str, field: str) -> Any:
        module_name, _, attribute = path.partition(":")
        refuse_strangers(self._modules)
        if "/" in self.reference:
            _put_first(str(Path(self.reference).parent))
        try:
            module = importlib.import_module(module_name) if module_name else self.module
            made = getattr(module, attribute)
        except Exception as error:
            raise ApplicationError(
                f"Application {self.application.name!r} has {field} {path!r}, which cannot be imported "
                f"({_cause(error)}); write ':Name' for this file or 'package.module:Name'."
            ) from error
        refuse_strangers(self._modules)
        return made


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def find_application(reference: str) -> FoundApplication:
    """The application behind a name in penstock.apps, an import path, or a user's own file.

    Args:
        reference: `"digits"`, `"package.module"`, `"package.module:attr"`, `"path/app.py"` or `"path/app.py:attr"`; the
            attribute is `app` where it is left out.

    Raises:
        ApplicationError: Nothing is there, it does not import, or it is not an `Application`.
    """
    path, colon, attribute = reference.rpartition(":")
    if not colon or "/" in attribute or attribute.endswith(".py"):
        path, attribute = reference, ""
    attribute = attribute or "app"
    if path.endswith(".py") or "/" in path:
        module = _module_from_file(Path(path).expanduser())
        path = str(Path(path).expanduser().resolve())
    else:
        module = _module_from_name(path)
    found = getattr(module, attribute, None)
    if not isinstance(found, Application):
        others = [name for name, value in vars(module).items() if isinstance(value, Application)]
        fix = f"it has {', '.join(others)}: write '{path}:{others[0]}'" if others else "declare it as 'app'"
        raise ApplicationError(f"{path} has no Application called {attribute!r}; {fix}.")
    short = path if attribute == "app" else f"{path}:{attribute}"
    return FoundApplication(application=found, module=module, reference=short)


def application_names() -> list[str]:
    """The names of the applications that come with penstock."""
    folder = Path(__file__).parent.parent / "apps"
    return sorted(file.parent.name for file in folder.glob("*/app.py"))


def _module_from_name(name: str) -> ModuleType:
    if not name or name.startswith("."):
        raise ApplicationError(
            f"{name!r} is not an application's name, import path or file; use one of {', '.join(application_names())}, "
            f"or the path of an app.py."
        )
    dotted = f"penstock.apps.{name}.app" if name in application_names() else name
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            raise ApplicationError(f"Application {name!r} needs the module {error.name!r}; install it.") from error
        raise ApplicationError(
            f"There is no application {name!r}; use one of {', '.join(application_names())}, "
            f"an import path or a path to an app.py."
        ) from error
    except ApplicationError:
        raise
    except Exception as error:
        raise ApplicationError(f"Application {name!r} does not import: {_cause(error)}.") from error


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ApplicationError(f"There is no file {file}; give the path of an app.py.")
    # Named by its content too: a file that is edited and found again is another module, not the old one.
    source = file.read_bytes()
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"penstock_user_{file.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ApplicationError(f"{file} is not a Python file; give the path of an app.py.")
    refuse_strangers(modules_beside(file, "", ()))
    module = importlib.util.module_from_spec(spec)
    _put_first(str(file.parent))
    sys.modules[name] = module
    try:
        # Not by the loader: what it compiled before it takes for the same where size and second of the edit are.
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, ApplicationError):
            raise
        raise ApplicationError(f"{file} does not import: {_cause(error)}.") from error
    return module


def _put_first(folder: str) -> None:
    # As when Python runs a file: the modules beside it can be imported.
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def describe(application: Application) -> dict[str, Any]:
    """What a client may know of an application, as JSON values."""
    live = application.live
    return {
        "name": application.name,
        "description": application.description,
        "input": application.input.to_json(),
        "output": application.output.to_json(),
        "raw": None if application.prepare is None else application.prepare.raw.to_json(),
        "recognition": None if application.recognition is None else application.recognition.to_json(),
        "accepts": _accepted(application),
        "max_body_bytes": application.max_body_bytes,
        "live": None if live is None else {"rate_hz": live.rate_hz, "sound": is_sound(live, application.input)},
    }


def _accepted(application: Application) -> list[str]:
    raw = "application/octet-stream"
    if application.live is None:
        return [*application.accepts, "application/json", raw]
    # Of a whole recording.
    return [*WAV, raw] if is_sound(application.live, application.input) else [raw]


def reply_of(application: Application) -> Reply:
    """The application's `reply`, or the default: the output as nested lists."""
    return application.reply or (lambda output: output.tolist())
