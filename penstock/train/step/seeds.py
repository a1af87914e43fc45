"""RNG seeds derived from (seed, step, rank), so that a resumed run draws the same numbers as an uninterrupted one."""

import torch

from penstock.train.step.cuda_graph import generator_of

# Dropout and augmentation, and any two processes, must draw different numbers.
DROPOUT = 0x5DEECE66D
RANK = 0xD1B54A32D192ED03


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of a process's step, from 0 to 2**64 - 1."""
    # Neighbouring seeds, steps and ranks must give unrelated seeds (splitmix64's constants).
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * RANK + 0x94D049BB133111EB) & (1 << 64) - 1
    return mixed ^ (mixed >> 31)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator and one device's; `torch.manual_seed` takes most of a millisecond without a GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        generator_of(device).manual_seed(seed)
