"""Five recurrent layers of 2,560 units over live sound, with random weights: what streams on GPUs are measured with."""

from penstock import Application, Live, TensorSpec
from penstock.models.speech import SpeechNet

RATE_HZ = 16_000
CHUNK = 1280  # 80 ms, 2,560 bytes
SYMBOLS = 32

app = Application(
    name="speech",
    description="Live sound to scores of characters, with random weights.",
    input=TensorSpec(
        dtype="int16", shape=(CHUNK,), meaning="one channel of sound", units="int16 PCM at 16 kHz", name="sound"
    ),
    output=TensorSpec(
        dtype="float32", shape=(4, SYMBOLS), meaning="log-probability of each symbol, every 20 ms", name="scores"
    ),
    live=Live(rate_hz=RATE_HZ),
    chunks=4,
    model=SpeechNet,
)
