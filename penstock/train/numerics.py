"""torch's numeric settings while a network is trained: precision, algorithms, threads and seed."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch

from penstock.train.recipe import Recipe


@contextmanager
def numerics(recipe: Recipe) -> Generator[None]:
    """Apply a recipe's numeric settings while the context is open, and restore torch's own afterwards."""
    execution, tf32 = recipe.execution, recipe.precision == "tf32"
    memory = cast(Any, torch.utils.deterministic)
    cudnn = torch.backends.cudnn
    deterministic_before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    threads_before = torch.get_num_threads()
    products_before, convolutions_before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    benchmark_before = cudnn.benchmark
    torch.set_num_threads(execution.threads or threads_before)
    torch.use_deterministic_algorithms(execution.deterministic)
    # Filling all new memory costs time at every step, and makes nothing here more deterministic.
    memory.fill_uninitialized_memory = False
    # By default torch runs fp32 convolutions in tf32.
    cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # cuDNN's benchmark mode picks the fastest algorithm by trying, which is not the same one in each run.
    cudnn.benchmark = not execution.deterministic
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    rng_before, gpu_rng_before = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    torch.manual_seed(recipe.seed)
    try:
        yield
    finally:
        torch.set_rng_state(rng_before)
        if gpu_rng_before is not None:
            torch.cuda.set_rng_state(gpu_rng_before)
        torch.use_deterministic_algorithms(deterministic_before[0])
        memory.fill_uninitialized_memory = deterministic_before[1]
        torch.set_num_threads(threads_before)
        cudnn.allow_tf32, cudnn.benchmark = convolutions_before, benchmark_before
        torch.set_float32_matmul_precision(products_before)
