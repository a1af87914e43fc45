"""Sets of examples that record their reads."""

import threading
import time
from typing import final

import numpy as np

from penstock.core.errors import BadExample
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds, draws_of


@final
class Counted(Examples):
    """Example i is `[i, a number of its seed]`, its target 10 i; some are bad, and reading takes a varying time."""

    def __init__(
        self,
        count: int,
        *,
        bad: tuple[int, ...] = (),
        varies: bool = True,
        slow_s: float = 0.0,
        raises: Exception | None = None,
    ) -> None:
        self.count, self.bad, self.varies, self.slow_s, self.raises = count, bad, varies, slow_s, raises
        self.input_dtype, self.input_shape = np.dtype("float64"), (2,)
        self.threads: set[str] = set()
        self.reads = 0

    @property
    def input_nbytes(self) -> int:
        # As large as a photograph, so that a batch is read in several pieces.
        return 1 << 18

    def __len__(self) -> int:
        return self.count

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        self.threads.add(threading.current_thread().name)
        self.reads += 1
        if self.raises is not None:
            raise self.raises
        if self.slow_s:
            time.sleep(self.slow_s * float(draws_of(seeds_B[:1], 1)[0, 0]))
        for index in indices_B.tolist():
            if index in self.bad:
                raise BadExample(f"example {index} is bad.", index=index, name=f"{index}.jpg")
        inputs_B[:, 0] = indices_B
        inputs_B[:, 1] = draws_of(seeds_B, 1)[:, 0] if self.varies else 0.0
        return indices_B * 10
