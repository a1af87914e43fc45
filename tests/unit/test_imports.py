"""What an import costs: fresh interpreters in which heavy libraries must not turn up."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import penstock
import penstock.core
import penstock.device
import penstock.score
import penstock.serve


def below(package: ModuleType) -> list[str]:
    """The modules of a package, at any depth."""
    return [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys; print(sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(ast.literal_eval(done.stdout))


def test_penstock_alone_loads_neither_torch_nor_numpy() -> None:
    assert loaded_by("import penstock").isdisjoint({"torch", "numpy", "sklearn", "matplotlib", "PIL", "typer", "rich"})


def test_the_check_sees_what_is_loaded() -> None:
    assert {"numpy", "penstock"} <= loaded_by("import penstock.core.spec")


def modules_without_torch() -> list[str]:
    return sorted({*below(penstock.core), *below(penstock.serve), *below(penstock.device), *below(penstock.score)})


def test_core_front_end_device_and_scoring_load_no_torch() -> None:
    statement = (
        "import importlib, sys\n"
        f"for module in {modules_without_torch()!r}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} loads torch'"
    )
    assert "penstock" in loaded_by(statement)


@pytest.mark.thorough
def test_each_module_of_core_front_end_device_and_scoring_loads_no_torch() -> None:
    # One interpreter for all of them: what of penstock came with one module is forgotten before the next, which is then
    # the first one itself.
    statement = (
        "import importlib, sys\n"
        f"for module in {modules_without_torch()!r}:\n"
        "    for name in [name for name in sys.modules if name.partition('.')[0] == 'penstock']:\n"
        "        del sys.modules[name]\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} loads torch'"
    )
    assert "penstock" in loaded_by(statement)


@pytest.mark.parametrize("arguments", ["--help", "--version", "serve --help", "train --help"])
def test_help_loads_nothing_heavy(arguments: str) -> None:
    statement = (
        f"import sys; sys.argv = ['penstock', *{arguments.split()!r}]\n"
        "import contextlib, io\nfrom penstock.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()"
    )
    assert loaded_by(statement).isdisjoint({"torch", "sklearn", "matplotlib", "PIL"})


@pytest.mark.parametrize("name", ["digits", "keywords", "speech"])
def test_reading_an_application_loads_no_torch(name: str) -> None:
    statement = f"from penstock.core.source_files.find_application import find_application\nfind_application({name!r})"
    assert "torch" not in loaded_by(statement)


def test_sharding_loads_no_torch() -> None:
    modules = ("penstock.cli.shard", "penstock.train.data.image_folder", "penstock.train.data.shard_writer")
    assert "torch" not in loaded_by(f"import {', '.join(modules)}")


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(penstock, name).__name__ == name


def test_all_is_complete() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    assert set(dir(penstock)) == {*penstock.__all__, "__version__"}
    tree = ast.parse(inspect.getsource(penstock))
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed - {None, "__version__"} == set(penstock.__all__), (
        "the names for type checkers and those for users differ"
    )


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match="it has Application, AsyncClient, Boxes, Bundle"):
        _ = penstock.Sandwich
