"""The error tree: what may be caught by which name, and which HTTP status a request's error has."""

import ast
import inspect
from pathlib import Path

import orjson
import pytest

import penstock
from penstock.core import errors
from penstock.core.errors import (
    BenchError,
    BundleCorrupt,
    BundleError,
    GoldenMismatch,
    InvalidInput,
    Overloaded,
    PenstockError,
    RequestError,
    SourcesChanged,
    WrongMethod,
)
from penstock.serve.exchange.response import rejected

ALL = [value for value in vars(errors).values() if inspect.isclass(value)]
PACKAGE = Path(penstock.__file__).parent
# What runs code from a file that is only meant to be data.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unsafe(text: str) -> list[str]:
    """Everything in a module that could read a pickle."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"torch.{alias.name}" for alias in node.names if alias.name == "load"]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Attribute) and node.func.attr == "load" else ""
            allows = (ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "allow_pickle")
            allow = next(allows, None)
            if called == "torch.load":
                found.append(called)
            if called in ("np.load", "numpy.load") and allow != "False":
                found.append(f"{called} without allow_pickle=False")
            if allow not in (None, "False"):
                found.append("allow_pickle")
    return found


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_a_penstock_error(error: type[Exception]) -> None:
    assert issubclass(error, PenstockError)


@pytest.mark.parametrize("error", [PenstockError, Overloaded, InvalidInput, BundleError])
def test_the_text_of_an_error_can_be_encoded_whatever_it_quotes(error: type[Exception]) -> None:
    quoted = error("é\ud800\0 bad") if error is not Overloaded else Overloaded("é\ud800\0 bad", 1.0)
    assert str(quoted) == "é\\ud800\0 bad"
    assert isinstance(quoted, PenstockError)
    assert not isinstance(quoted, RequestError) or orjson.loads(rejected(quoted).body) == {"error": str(quoted)}


def test_the_tree_in_the_module_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        name = next((word for word in line.split() if hasattr(errors, word)), None)
        if name is not None:
            depth = line.index(name) // 4
            above[depth] = name
            drawn[name] = above[depth - 1] if depth else ""
    assert drawn == {error.__name__: error.mro()[1].__name__ if error is not PenstockError else "" for error in ALL}


@pytest.mark.parametrize("error", [BundleCorrupt, SourcesChanged, GoldenMismatch])
def test_every_fault_of_a_bundle_is_a_bundle_error(error: type[Exception]) -> None:
    assert issubclass(error, BundleError)


@pytest.mark.parametrize("error", [error for error in ALL if issubclass(error, RequestError)])
def test_the_status_of_a_request_error_stands_in_the_tree(error: type[RequestError]) -> None:
    assert 400 <= error.status < 600
    lines = [line for line in (errors.__doc__ or "").splitlines() if error.__name__ in line.split()]
    assert str(error.status) in lines[0] or error is RequestError


def test_what_an_error_carries_beside_its_sentence() -> None:
    assert WrongMethod("no", "GET, HEAD").allowed == "GET, HEAD"
    assert Overloaded("full", 0.25).retry_after_s == 0.25
    assert str(BenchError("a sentence.")) == "a sentence."


@pytest.mark.parametrize("file", sources(), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_pickle_is_ever_read(file: Path) -> None:
    assert unsafe(file.read_text()) == []


def test_the_search_for_pickles_finds_them() -> None:
    imports = "import pickle\nfrom torch import load\nimport torch\n"
    text = f"{imports}torch.load('f')\nnp.load('f')\nnp.save('f', allow_pickle=True)"
    assert unsafe(text) == ["pickle", "torch.load", "torch.load", "np.load without allow_pickle=False", "allow_pickle"]
