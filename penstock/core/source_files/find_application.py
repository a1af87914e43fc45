"""Find an application by its name, import path or file, with the hashes of its sources."""

import ast
import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar

from penstock.core.application import Application
from penstock.core.chains.chain import Chain
from penstock.core.errors import ApplicationError
from penstock.core.machine.extras import missing_package
from penstock.core.source_files.app_sources import check_loaded_modules, local_modules
from penstock.core.source_files.pinned_sources import is_source, read_source
from penstock.core.speech.ngram import NGram
from penstock.core.subwords import read_subwords
from penstock.core.texts.subword_text import SubwordReply, SubwordText

T = TypeVar("T", Application, Chain)
# What is said of a file that declares another kind than is asked for.
_OTHER_KINDS: dict[type, str] = {
    Application: "the application {!r}: train it, and name the bundle that comes of it",
    Chain: "the chain {!r}, which has no weights: train its parts",
}

# Of files, by the names of their modules.
_locks: dict[str, RLock] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundApplication:
    """An application, the module that declares it, and the hashes of its sources when it was found.

    Args:
        application: The record.
        module: The declaring module, in which `":Net"` is looked up.
        reference: Finds it again: `"digits"`, `"pkg.mod:attr"` or `"/path/app.py:attr"`.

    Raises:
        ApplicationError: A declared text has a file that is no vocabulary.
    """

    application: Application
    module: ModuleType
    reference: str
    _modules: dict[str, Path] = field(init=False, repr=False, compare=False)
    _sources: dict[str, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        file = getattr(self.module, "__file__", None)
        modules: dict[str, Path] = {}
        sources: dict[str, bytes] = {}
        application = self.application
        declared = (application.decode, application.reply)
        texts = [text for text in declared if isinstance(text, SubwordText | SubwordReply)]
        for text in texts:
            # Before a training or a server starts, not at the first request; at import it would cost each command.
            read_subwords(text.vocabulary)
        if file is not None:
            home = Path(file).resolve()
            parts = [part.module for part in (application.prepare, application.finish) if part is not None]
            beam = None if application.live is None else application.live.beam
            paths = (application.model, application.recipe, *parts, *(() if beam is None else (beam.language,)))
            roots = [path.partition(":")[0] for path in paths if isinstance(path, str)]
            modules = local_modules(home, self.module.__package__ or "", roots)
            # Read now, because a file edited during a long training is not the one that trained.
            read = {text.vocabulary.resolve() for text in texts}
            for source in sorted({home, *modules.values(), *read}):
                if source.is_relative_to(home.parent):
                    sources[source.relative_to(home.parent).as_posix()] = read_source(source)
        object.__setattr__(self, "_modules", modules)
        object.__setattr__(self, "_sources", sources)

    def model(self) -> Any:
        """Make a network (a `torch.nn.Module`) with untrained weights."""
        return self._make(self.application.model, "model")

    def recipe(self) -> Any:
        """The training recipe.

        Raises:
            ApplicationError: The application has none.
        """
        if self.application.recipe is None:
            raise ApplicationError(f"Application {self.application.name!r} has no recipe; give it one to train it.")
        return self._make(self.application.recipe, "recipe")

    def prepare(self) -> Any:
        """Make the module (a `torch.nn.Module`) that turns one raw array into one chunk.

        Raises:
            ApplicationError: The application has none.
        """
        if self.application.prepare is None:
            raise ApplicationError(f"Application {self.application.name!r} has no prepare; its input is of one size.")
        return self._make(self.application.prepare.module, "prepare")

    def finish(self) -> Any:
        """Make the module (a `torch.nn.Module`) that turns the network's own outputs into the declared ones.

        Raises:
            ApplicationError: The application has none.
        """
        if self.application.finish is None:
            raise ApplicationError(f"Application {self.application.name!r} has no finish; its network gives outputs.")
        return self._make(self.application.finish.module, "finish")

    def language(self) -> NGram | None:
        """Make the language model of the endpoint beam; None where the application has none.

        Raises:
            ApplicationError: It cannot be made, or is another object.
        """
        beam = None if self.application.live is None else self.application.live.beam
        if beam is None or beam.language is None:
            return None
        made = self._make(beam.language, "language")
        if not isinstance(made, NGram):
            raise ApplicationError(
                f"The language of application {self.application.name!r} is {made!r:.80}; it must make an NGram."
            )
        return made

    def sources(self) -> dict[str, bytes]:
        """The content of each source file when the application was found, by the paths of `source_sha256`."""
        return dict(self._sources)

    def source_sha256(self) -> dict[str, str]:
        """The SHA-256 of each source file when the application was found, by its path relative to the declaring file.

        Sources are the declaring file and every module in its folder or below that it imports, directly or not, or that
        `model`, `recipe`, `prepare`, `finish` or `language` name, and the vocabulary of a declared text.
        """
        return {name: _digest(text) for name, text in self._sources.items()}

    def code_sha256(self) -> dict[str, str]:
        """The SHA-256 of the syntax tree of each source file: comments and line breaks do not change it."""
        return {name: _digest(code_of(text)) for name, text in self._sources.items()}

    def _make(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            value = self._import(value, field)
        if not callable(value):
            return value
        try:
            return value()
        except TypeError as error:
            raise ApplicationError(
                f"The {field} of application {self.application.name!r} cannot be made ({error}); it is called without "
                f"arguments."
            ) from error

    def _import(self, path: str, field: str) -> Any:
        module_name, _, attribute = path.partition(":")
        check_loaded_modules(self._modules)
        if "/" in self.reference:
            assert self.module.__file__ is not None, self.reference
            _prepend_path(str(Path(self.module.__file__).parent))
        try:
            module = importlib.import_module(module_name) if module_name else self.module
            made = getattr(module, attribute)
        except (Exception, SystemExit) as error:
            raise ApplicationError(
                f"Application {self.application.name!r} has {field} {path!r}, which cannot be imported "
                f"({_cause(error)}); write ':Name' for this file or 'package.module:Name'."
            ) from error
        check_loaded_modules(self._modules)
        return made


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def code_of(text: bytes) -> bytes:
    """The syntax tree of a source text, without comments and line breaks; the text itself if it is no Python."""
    try:
        return ast.dump(ast.parse(text)).encode()
    except (SyntaxError, ValueError):
        return text


def find_application(reference: str, copy: Path | None = None) -> FoundApplication:
    """Import an application by its name in penstock.apps, its import path, or its file.

    Args:
        reference: `"digits"`, `"package.module"`, `"package.module:attr"`, `"path/app.py"` or `"path/app.py:attr"`; the
            attribute is `app` by default.
        copy: A file that is imported in place of the one that the reference names, which need not exist here.

    Raises:
        ApplicationError: Nothing is there, it does not import, or it is not an `Application`.
    """
    module, found, short = _find(reference, Application, "app", copy)
    return FoundApplication(application=found, module=module, reference=short)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundChain:
    """A chain and the hash of its source.

    Args:
        chain: The record.
        reference: Finds it again: `"pkg.mod:attr"` or `"/path/chain.py:attr"`.
        sha256: Hash of the declaring file; empty if it has none.
    """

    chain: Chain
    reference: str
    sha256: str


def find_chain(reference: str) -> FoundChain:
    """Import a chain by its import path or its file.

    Args:
        reference: `"path/chain.py"`, `"path/chain.py:attr"`, `"package.module"` or `"package.module:attr"`; the
            attribute is `chain` by default.

    Raises:
        ApplicationError: Nothing is there, it does not import, or it is not a `Chain`.
    """
    module, found, short = _find(reference, Chain, "chain")
    file = getattr(module, "__file__", None)
    return FoundChain(chain=found, reference=short, sha256="" if file is None else _digest(read_source(Path(file))))


def _find(reference: str, kind: type[T], default: str, copy: Path | None = None) -> tuple[ModuleType, T, str]:
    """Find a module's record of a kind; returns the module, the record, and the shortest reference."""
    path, attribute = reference_parts(reference)
    attribute = attribute or default
    if names_file(path):
        module = _module_from_file(copy or Path(path).expanduser())
        path = str(Path(path).expanduser().resolve())
    else:
        module = _module_from_name(path)
    found = getattr(module, attribute, None)
    if not isinstance(found, kind):
        others = [name for name, value in vars(module).items() if isinstance(value, kind)]
        fix = f"it has {', '.join(others)}: write '{path}:{others[0]}'" if others else f"declare it as {default!r}"
        if not others and (
            other := next((v for v in vars(module).values() if isinstance(v, Application | Chain)), None)
        ):
            fix = f"it has {_OTHER_KINDS[type(other)].format(other.name)}"
        raise ApplicationError(f"{path} has no {kind.__name__} called {attribute!r}; {fix}.")
    return module, found, path if attribute == default else f"{path}:{attribute}"


def refuse_downloaded(reference: str, folder: Path) -> None:
    """Refuse to run a file of a folder that may have been downloaded, and names its own application.

    Args:
        reference: The application, as the folder names it.
        folder: A bundle or a run, which hold no code.

    Raises:
        ApplicationError: The application's file is in the folder.
    """
    named = Path(reference_parts(reference)[0]).expanduser()
    file = named.resolve()
    # A link in the folder is of the folder too.
    if file.is_relative_to(folder.resolve()) or named.absolute().is_relative_to(folder.absolute()):
        raise ApplicationError(
            f"{folder} names a file of its own, {file.name!r}, as its application, which would run what was "
            f"downloaded; if you trust it, name the file with --app (app=...)."
        )


def reference_parts(reference: str) -> tuple[str, str]:
    """Split a reference into a module or a file, and the name of the record."""
    path, colon, attribute = reference.rpartition(":")
    if not colon or "/" in attribute or attribute.endswith(".py"):
        return reference, ""
    return path, attribute


def names_file(path: str) -> bool:
    """Tell whether the first of `reference_parts` is the place of a file, and no import path or name."""
    return path.endswith(".py") or "/" in path


def application_names() -> list[str]:
    """The names of the applications that come with penstock."""
    folder = Path(__file__).parents[2] / "apps"
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
    except (Exception, SystemExit) as error:
        raise ApplicationError(f"Application {name!r} does not import: {_cause(error)}.") from error


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not is_source(file):
        raise ApplicationError(f"There is no file {file}; give the path of an app.py.")
    # Named by its content too, so that a file that was edited is a new module.
    source = read_source(file)
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()
    name = f"penstock_user_{file.stem}_{digest[:12]}"
    # Whoever comes second waits, as for Python's own imports, and does not get a module that is half made.
    with _locks.setdefault(name, RLock()):
        return sys.modules.get(name) or _executed(name, file, source)


def _executed(name: str, file: Path, source: bytes) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ApplicationError(f"{file} is not a Python file; give the path of an app.py.")
    check_loaded_modules(local_modules(file, "", ()))
    module = importlib.util.module_from_spec(spec)
    _prepend_path(str(file.parent))
    sys.modules[name] = module
    try:
        # Not by the loader, whose cache misses an edit within one second that keeps the size.
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        # A file that is a program ends it, and not the process that wanted an application.
        del sys.modules[name]
        if isinstance(error, ApplicationError):
            raise
        if isinstance(error, ModuleNotFoundError) and (sentence := missing_package(str(file), error.name, "")):
            raise ApplicationError(sentence) from error
        raise ApplicationError(f"{file} does not import: {_cause(error)}.") from error
    return module


def _prepend_path(folder: str) -> None:
    # As when Python runs a file, its folder comes first.
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
