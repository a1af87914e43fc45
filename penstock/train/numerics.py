"""torch's numeric settings while a network is trained: precision, algorithms, threads and seed."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from penstock.train.recipe import Recipe


@contextmanager
def numerics(recipe: Recipe) -> Generator[None]:
    """Apply a recipe's numeric settings while the context is open, and restore torch's own afterwards."""
    execution, tf32 = recipe.execution, recipe.precision == "tf32"
    cudnn: Any = torch.backends.cudnn
    settings = (
        # Filling all new memory costs time at every step, and makes nothing here more deterministic.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        # By default torch runs fp32 convolutions in tf32.
        (cudnn, "allow_tf32", tf32),
        # cuDNN's benchmark mode picks the fastest algorithm by trying, which is not the same one in each run.
        (cudnn, "benchmark", not execution.deterministic),
    )
    functions = (
        (torch.get_num_threads, torch.set_num_threads, execution.threads or torch.get_num_threads()),
        (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            execution.deterministic,
        ),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high" if tf32 else "highest"),
    )
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    with ExitStack() as restored, torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        for owner, name, value in settings:
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for read, write, value in cast(Any, functions):
            restored.callback(write, read())
            write(value)
        torch.manual_seed(recipe.seed)
        yield
