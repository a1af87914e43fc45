"""One recurrent layer of 256 units over live sound, with random weights: for measuring streams on a CPU core."""

from penstock import Application, Live, TensorSpec

RATE_HZ = 8_000
CHUNK = 160  # 20 ms, 320 bytes
SYMBOLS = 16


def network():
    """Thirty-two bands, one GRU of 256 units, sixteen scores every 20 ms."""
    from torch import nn

    from penstock.nn import GRU, LogMel, Sequential

    return Sequential(
        LogMel(RATE_HZ, window_ms=32, hop_ms=20, bands=32), GRU(32, 256), nn.Linear(256, SYMBOLS), nn.LogSoftmax(-1)
    )


app = Application(
    name="murmur",
    description="Live sound to sixteen scores, with random weights.",
    input=TensorSpec(
        dtype="int16", shape=(CHUNK,), meaning="one channel of sound", units="int16 PCM at 8 kHz", name="sound"
    ),
    output=TensorSpec(
        dtype="float32", shape=(1, SYMBOLS), meaning="log-probability of each symbol, every 20 ms", name="scores"
    ),
    live=Live(rate_hz=RATE_HZ),
    chunks=4,
    model=":network",
)
