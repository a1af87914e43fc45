"""Mutation testing of one module: `python -m tests.mutation.mutate MODULE TEST...`.

Each mutant changes one comparison, operator, constant or returned value. Its tests run in a fork of this process, which
has imported pytest and NumPy but not the module; for tests that start processes of their own, in a copy of the source
tree (`--copies`). A mutant survives if all tests pass.
"""

import argparse
import ast
import copy
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

TIMEOUT_S = 120
COPIED = ("penstock", "benchmarks", "tests")
# Imported once, before the forks.
IMPORTED = ("hypothesis", "numpy", "penstock.core.errors", "penstock.core.spec")
SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


class Loader:
    """Loads a module from a mutated tree."""

    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self._name, self._tree, self._path = name, tree, path

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=self._path) if name == self._name else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, self._path, "exec"), vars(module))


def mutations(node: ast.AST) -> list[Callable[[ast.AST], None]]:
    """Changes of one node, each for a copy of it."""

    def set_to(field: str, value: object, at: int | None = None) -> Callable[[ast.AST], None]:
        return lambda one: setattr(one, field, value) if at is None else getattr(one, field).__setitem__(at, value)

    match node:
        case ast.Compare(ops=ops):
            return [set_to("ops", new(), at) for at, op in enumerate(ops) for new in SWAPS.get(type(op), ())]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            return [set_to("op", new()) for new in SWAPS.get(type(op), ())]
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            return [set_to("op", ast.UAdd())]
        case ast.Constant(value=bool() as value):
            return [set_to("value", not value)]
        case ast.Constant(value=int() | float() as value):
            return [set_to("value", value + 1), set_to("value", value - 1)]
        case ast.Return(value=value) if value is not None:
            return [set_to("value", ast.Constant(None))]
        case _:
            return []


def mutants(tree: ast.Module) -> list[tuple[str, ast.Module]]:
    """Every mutant with its place."""
    found: list[tuple[str, ast.Module]] = []
    annotations = {
        id(child)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(getattr(node, field, None), ast.AST)
        for child in ast.walk(getattr(node, field))
    }
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in annotations:
            continue
        for change in mutations(node):
            mutant = copy.deepcopy(tree)
            one = next(each for at, each in enumerate(ast.walk(mutant)) if at == index)
            change(one)
            line = getattr(node, "lineno", 0)
            found.append((f"{line}: {ast.unparse(node)}  ->  {ast.unparse(one)}", ast.fix_missing_locations(mutant)))
    return found


def start(name: str, mutant: ast.Module, path: str, tests: Sequence[str], *, copies: bool) -> int:
    """Run the tests on a mutant in a fork or in a copy of the tree; returns the process ID."""
    process = os.fork()
    if process == 0:
        signal.alarm(2 * TIMEOUT_S)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # Without plugins and configuration, whose start would take longer than the tests.
        arguments = [*tests, "-x", "-q", "--noconftest", "-c", os.devnull, "--rootdir", "."]
        if copies:
            os._exit(_run_in_copy(mutant, path, arguments))
        sys.meta_path.insert(0, Loader(name, mutant, path))  # type: ignore[arg-type]
        os._exit(0 if pytest.main(arguments) == 0 else 1)
    return process


def _run_in_copy(mutant: ast.Module, path: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            shutil.copytree(name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, path).write_text(ast.unparse(mutant))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", *arguments]
        try:
            return subprocess.run(command, cwd=folder, env=environment, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return 1


def main() -> None:
    """Print the survivors and the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants tested at once")
    parser.add_argument("--copies", action="store_true", help="write each mutant into a copy of the source tree")
    given = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    path = Path(*given.module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    unchanged = start(given.module, tree, str(path), given.tests, copies=given.copies)
    assert os.waitpid(unchanged, 0)[1] == 0, "the tests must pass on the module itself"
    waiting = mutants(tree)
    made, alive = len(waiting), 0
    running: dict[int, str] = {}
    while waiting or running:
        if waiting and len(running) < given.jobs:
            place, mutant = waiting.pop(0)
            running[start(given.module, mutant, str(path), given.tests, copies=given.copies)] = place
            continue
        process, status = os.wait()
        place = running.pop(process)
        if status == 0:
            alive += 1
            print(f"survived {path}:{place}", flush=True)
    print(f"{given.module}: {made} mutants, {made - alive} killed, {alive} survived", flush=True)


if __name__ == "__main__":
    main()
