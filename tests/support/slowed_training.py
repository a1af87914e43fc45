"""A training to interrupt at any moment, which takes its time while a file `slow` is beside its application."""

from benchmarks.acceptance.train.resume import APPLICATION

# So that there is time to interrupt it on a busy machine, too.
_SLOWED = '''def slowed(x: Tensor) -> Tensor:
    """Give the inputs back, after a while."""
    time.sleep(0.01 * Path(__file__).with_name("slow").exists())
    return x


recipe = Recipe('''
SLOW = (
    APPLICATION.replace("import numpy as np", "import time\nfrom pathlib import Path\n\nimport numpy as np")
    .replace("recipe = Recipe(", _SLOWED)
    .replace("generator: (x +", "generator: (slowed(x) +")
)
assert SLOW.count("slowed") == 2
