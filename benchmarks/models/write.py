"""Write the bundles of the server comparison, with random weights from a seed.

python -m benchmarks.models.write --to runs/models [--only NAME] [--seed 0]
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from penstock import Bundle
from penstock.core.source_files.find_application import find_application

HERE = Path(__file__).parent
ONE_SHOT = ("cnn", "mlp")
# The last is an application of Penstock.
LIVE = ("murmur", "mutter", "ponder", "speech", "keywords")
MODELS = ONE_SHOT + LIVE
EXAMPLES = 32
# Golden sounds of live models, and their length.
SOUNDS, SOUND_S = 2, 2


def write_bundle(model: str, folder: Path, seed: int = 0) -> Bundle:
    """Write the bundle of a model with random weights and random golden examples.

    Args:
        model: One of `MODELS`.
        folder: The bundle's folder; an existing bundle is replaced.
        seed: Seed of the weights and of the examples.

    Raises:
        BundleError: The folder holds something else.
    """
    file = HERE / f"{model}.py"
    found = find_application(str(file) if file.exists() else model)
    torch.manual_seed(seed)
    network = found.model()
    spec, live = found.application.input_tensor, found.application.live
    rng = np.random.default_rng(seed)
    if live is None:
        examples = rng.integers(0, 256, (EXAMPLES, *spec.shape)).astype(spec.dtype)
    else:
        examples = rng.normal(0, 3000, (SOUNDS, int(SOUND_S * live.rate_hz))).astype(spec.dtype)
    return Bundle.write(found, network, examples, to=folder)


def main() -> None:
    """Write all models, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/models"))
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for model in given.only or MODELS:
        bundle = write_bundle(model, given.to / model, given.seed)
        print(f"{bundle.folder}: {bundle.manifest.parameters:,} parameters")


if __name__ == "__main__":
    main()
