"""How torch computes while a network is trained: with which bits, and by which algorithms."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch

from penstock.train.recipe import Recipe


@contextmanager
def numerics(recipe: Recipe) -> Generator[None]:
    """While it is entered, torch computes as a recipe asks for; its own settings come back afterwards."""
    memory = cast(Any, torch.utils.deterministic)
    cudnn = torch.backends.cudnn
    deterministic_before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    threads_before = torch.get_num_threads()
    products_before, convolutions_before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    tried_before = cudnn.benchmark
    torch.set_num_threads(recipe.threads or threads_before)
    torch.use_deterministic_algorithms(recipe.deterministic)
    # Filling all new memory first costs time at every step and makes nothing here more deterministic.
    memory.fill_uninitialized_memory = False
    # Torch itself lets convolutions of fp32 numbers be done in tf32.
    cudnn.allow_tf32 = recipe.precision == "tf32"
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    # Which of several algorithms is the fastest is found by trying; not the same one is found each time.
    cudnn.benchmark = not recipe.deterministic
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    chance_before, chance_of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    torch.manual_seed(recipe.seed)
    try:
        yield
    finally:
        torch.set_rng_state(chance_before)
        if chance_of_gpu is not None:
            torch.cuda.set_rng_state(chance_of_gpu)
        torch.use_deterministic_algorithms(deterministic_before[0])
        memory.fill_uninitialized_memory = deterministic_before[1]
        torch.set_num_threads(threads_before)
        cudnn.allow_tf32, cudnn.benchmark = convolutions_before, tried_before
        torch.set_float32_matmul_precision(products_before)
