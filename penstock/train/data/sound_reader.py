"""Sound files as training examples: FLAC, WAV, Ogg and MP3, as mono samples at one rate."""

import io
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput, TrainError
from penstock.core.machine.extras import missing_package
from penstock.core.spec import Array, TensorSpec

# T frames (samples)

_FULL_SCALE = 32_768.0


@final
class SoundReader:
    """Reads sound files in the form of a spec: `(frames,)` of int16, or of float32 from -1 to 1.

    A `Dim` of frames keeps each sound's length. A fixed number of frames is padded with silence or cut at its end.

    Args:
        spec: The raw input.
        sample_rate_hz: The rate of the samples; other files are resampled.

    Raises:
        TrainError: The spec is not a sound's, or the package soundfile is missing.
    """

    def __init__(self, spec: TensorSpec, sample_rate_hz: int) -> None:
        if len(spec.shape) != 1 or spec.dtype not in ("int16", "float32"):
            raise TrainError(f"sound is read as {spec.describe()}; give a spec of int16 or float32 of shape (frames,).")
        if sample_rate_hz <= 0:
            raise TrainError(f"the sample rate is {sample_rate_hz} Hz; it must be above 0.")
        try:
            import soundfile
        except ModuleNotFoundError as error:
            raise TrainError(missing_package("reading sound files", error.name, "DatasetExamples") or "") from None
        self._file: Any = soundfile
        self._spec, self._rate_hz = spec, sample_rate_hz

    def read(self, source: Path | bytes) -> Array:
        """Read one sound.

        Raises:
            InvalidInput: It cannot be decoded.
        """
        try:
            given = io.BytesIO(source) if isinstance(source, bytes) else str(source)
            samples_TC, rate_hz = self._file.read(given, dtype="float32", always_2d=True)
        except (self._file.LibsndfileError, RuntimeError) as error:
            raise InvalidInput(f"It is no sound file that can be read ({error}).") from None
        samples_T = samples_TC.mean(1)
        if rate_hz != self._rate_hz:
            import soxr

            samples_T = soxr.resample(samples_T, rate_hz, self._rate_hz)
        if self._spec.dtype == "int16":
            samples_T = np.clip(np.rint(samples_T * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1)
        return self._sized(samples_T.astype(self._spec.numpy_dtype))

    def _sized(self, samples_T: Array) -> Array:
        frames = self._spec.shape[0]
        if isinstance(frames, Dim):
            return samples_T
        sized_T = np.zeros(frames, samples_T.dtype)
        sized_T[: len(samples_T)] = samples_T[:frames]
        return sized_T
