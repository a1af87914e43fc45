"""The beam process: decodes the utterances of a front-end again, one after the other.

It reads orders from its standard input and writes answers to its standard output; each is the two lengths of a JSON
object and of the arrays behind it. It ends with its standard input, that is with its front-end.
"""

import hashlib
import logging
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from penstock.core.errors import BundleCorrupt
from penstock.core.machine.priority import lower_priority
from penstock.core.speech.endpoint_beam import EndpointBeam
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.ngram import MAX_FILE_BYTES, NGram
from penstock.core.speech.prefix_beam import SearchStopped
from penstock.core.speech.utterance_decoder import UtteranceDecoder, UtteranceFrames
from penstock.core.storage.regular_file import read_regular

log = logging.getLogger(__name__)

LENGTHS = struct.Struct("<II")


def message_of(fields: dict[str, Any], *arrays: bytes) -> bytes:
    """Make the bytes of an order or an answer."""
    head = orjson.dumps(fields)
    return b"".join((LENGTHS.pack(len(head), sum(map(len, arrays))), head, *arrays))


def read_message(read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """Read an order or an answer.

    Args:
        read: Reads so many bytes; fewer only at the end.

    Raises:
        EOFError: The other end is gone.
    """
    lengths = read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        raise EOFError
    head, arrays = LENGTHS.unpack(lengths)
    data = read(head + arrays)
    if len(data) < head + arrays:
        raise EOFError
    return orjson.loads(data[:head]), data[head:]


def made_decoder(fields: dict[str, Any]) -> UtteranceDecoder:
    """Make the decoder of a model.

    Raises:
        PenstockError: Its language model cannot be used.
        OSError: It cannot be read.
    """
    given = fields["beam"]
    hot_words = tuple(HotWord(*word) for word in given.pop("hot_words"))
    language = None
    if fields["language"]:
        data = read_regular(Path(fields["language"]), MAX_FILE_BYTES)
        if hashlib.sha256(data).hexdigest() != fields["sha256"]:
            raise BundleCorrupt(f"{fields['language']} was altered; load the model again.")
        language = NGram.from_bytes(data)
    return UtteranceDecoder(tuple(fields["symbols"]), EndpointBeam(**given, hot_words=hot_words), language)


def decoded(decoder: UtteranceDecoder, fields: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Decode an utterance; no text where the time was over."""
    end_s = time.monotonic() + fields["limit_s"]
    frames, symbols = fields["shape"]
    split = frames * symbols * 2
    log_probability_TV = np.frombuffer(data[:split], np.float16).reshape(frames, symbols)
    utterance = UtteranceFrames(log_probability_TV, np.frombuffer(data[split:], np.int32))
    hot_words = [HotWord(*word) for word in fields["hot_words"]]
    try:
        found = decoder.decode(utterance, hot_words, lambda: time.monotonic() > end_s)
    except SearchStopped:
        return {"late": True}
    words = [[word.text, word.start_s, word.end_s, word.probability] for word in found.words]
    return {"text": found.text, "words": words}


def main() -> None:
    """Answer orders until the front-end is gone."""
    lower_priority()
    source, to = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What an import prints is no answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decoders: dict[int, UtteranceDecoder] = {}
    while True:
        try:
            fields, data = read_message(source.read)
        except EOFError:
            return
        key = fields["model"]
        answer: dict[str, Any] = {}
        try:
            if fields["type"] == "load":
                decoders[key] = made_decoder(fields)
            elif fields["type"] == "unload":
                decoders.pop(key, None)
            else:
                answer = decoded(decoders[key], fields, data)
        except Exception as error:  # one utterance or model fails, the others go on
            log.exception("the beam process failed on a %s", fields["type"])
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            to.write(message_of(answer))
            to.flush()
        except OSError:
            return


if __name__ == "__main__":
    main()
