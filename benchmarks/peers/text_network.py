"""The network of texts that peers serve: a batch is padded to its longest text."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.peers.servers import CACHE
from penstock.core.record import RecordSpec
from penstock.runtime.execution import Execution
from penstock.runtime.executor import StepInput
from penstock.runtime.executor_choice import make_runnable


@final
class TextNetwork:
    """The network of a bundle of texts, run by Penstock's own executor, so that servers are compared and not networks.

    Args:
        bundle: The bundle's folder.

    Raises:
        BundleError: It is damaged, or its answers are not the recorded ones.
    """

    def __init__(self, bundle: Path) -> None:
        runnable = make_runnable(bundle, Execution(cache=CACHE, cores=1), lambda _: 64)
        self._executor = runnable.executor
        spec = runnable.application.input
        assert isinstance(spec, RecordSpec), spec
        self._spec = spec

    def answer(self, bodies: Sequence[bytes]) -> list[bytes]:
        """One batch: the token ids of each text, int64, to the raw bytes of its scores, float32."""
        texts = [np.frombuffer(body, np.int64) for body in bodies]
        rows = len(texts)
        lengths = np.array([text.size for text in texts])
        inside_BT = np.arange(lengths.max()) < lengths[:, None]
        ids_BT = np.zeros(inside_BT.shape, np.int64)
        ids_BT[inside_BT] = np.concatenate(texts)
        arrays = {"input_ids": ids_BT, "attention_mask": inside_BT.astype(np.int64)}
        batch = StepInput(
            slots_B=np.arange(rows),
            chunk_B=self._spec.records(arrays, {"tokens": lengths}),
            length_B=np.ones(rows, np.int64),
            fresh_B=np.ones(rows, np.bool_),
        )
        return [row.tobytes() for row in self._executor.step(batch).output_B]
