"""The network of the translator."""

from penstock.apps.translate.app import HEADS, LAYERS, WIDTH
from penstock.apps.translate.tokenizer import END, FIRST, tokenizer
from penstock.models.encoder_decoder import EncoderDecoder
from penstock.nn.decoding import Beam, Decoding, Greedy

BEAMS, LENGTH_PENALTY = 4, 1.0
# Of the state of `EncoderDecoder`, equal in all beams.
SHARED = ("memory", "source", "past")


def translator(width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, dropout: float = 0.1) -> Greedy:
    """The network with a greedy choice of tokens, 20 million parameters."""
    decoder = EncoderDecoder(
        len(tokenizer()),
        width=width,
        heads=heads,
        encoder_layers=layers,
        decoder_layers=layers,
        hidden=4 * width,
        dropout=dropout,
    )
    return Greedy(decoder, first=FIRST, end=END)


def with_beams(network: Decoding, beams: int = BEAMS, length_penalty: float = LENGTH_PENALTY) -> Beam:
    """Return a network that uses the same weights with beam search."""
    return Beam(network.decoder, first=FIRST, end=END, beams=beams, length_penalty=length_penalty, shared=SHARED).train(
        network.training
    )
