"""All chance of a step is a function of its number: a run goes on from there as if it had never stopped."""

import torch

from penstock.train.graph import generator_of

# Dropout's chance must not be the augmentation's, nor one process's another's.
DROPOUT = 0x5DEECE66D
RANK = 0xD1B54A32D192ED03


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """The seed of one process's step, from 0 to 2**64 - 1."""
    # Neighbouring seeds, steps and ranks must not share their chance: spread all over 64 bits (splitmix64's constants).
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * RANK + 0x94D049BB133111EB) & (1 << 64) - 1
    return mixed ^ (mixed >> 31)


def seed_torch(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed` for the CPU and one device: that takes most of a millisecond where there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        generator_of(device).manual_seed(seed)
