"""Mutation testing of one module: `python -m tests.mutation.mutate MODULE TEST...`.

Each mutant changes one comparison, operator, constant or returned value. Its tests run in a fork of this process, which
has imported pytest and NumPy but not the module. A mutant survives if all tests pass.
"""

import argparse
import ast
import copy
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

TIMEOUT_S = 120
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


def survives(name: str, mutant: ast.Module, path: str, tests: Sequence[str]) -> bool:
    """Run the tests on a mutant in a fork."""
    process = os.fork()
    if process == 0:
        signal.alarm(TIMEOUT_S)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.meta_path.insert(0, Loader(name, mutant, path))  # type: ignore[arg-type]
        # Without plugins and configuration, whose start would take longer than the tests.
        status = pytest.main([*tests, "-x", "-q", "--noconftest", "-c", os.devnull, "--rootdir", "."])
        os._exit(0 if status == 0 else 1)
    return os.waitpid(process, 0)[1] == 0


def main() -> None:
    """Print the survivors and the count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    given = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    path = Path(*given.module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    assert survives(given.module, tree, str(path), given.tests), "the tests must pass on the module itself"
    made = mutants(tree)
    alive = 0
    for place, mutant in made:
        if survives(given.module, mutant, str(path), given.tests):
            alive += 1
            print(f"survived {path}:{place}", flush=True)
    print(f"{given.module}: {len(made)} mutants, {len(made) - alive} killed, {alive} survived", flush=True)


if __name__ == "__main__":
    main()
