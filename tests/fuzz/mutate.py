"""Mutations of seed inputs without coverage; a random seed gives the same inputs on every machine."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 4096

# What the borders look for, and numbers at the edges of what a machine's word holds.
TOKENS = (
    *(b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b": ", b"\x00", b"\xff", b"\xff\x40", b"\xfe", b"\xb2", b"HTTP/1.0"),
    *(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"POST / HTTP/1.1\r\n", b"HEAD ", b"CONNECT a:1 "),
    *(b"PRI * HTTP/2.0\r\n\r\n", b"%ff"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Upgrade: h2c\r\n"),
    *(b"Connection: upgrade\r\n", b"Connection: close\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n"),
    *(b"null", b"true", b"false", b"NaN", b"[]", b"{}", b'""', b"[[", b'"id":', b'"timeout":', b'"parameters":{'),
    *(b'"data":[', b'"shape":[', b'"binary_data_size":', b'"binary_data":true', b'"outputs":[', b"\\ud800"),
    *(b"0", b"-1", b"1e999", b"1e-999", b"-0.0", b"0.5", b"256", b"65505", b"2147483648", b"9223372036854775807"),
    *(b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"1" + b"0" * 400, b"9" * 4400),
    *(b'"tickets":true,', b'"ticket":"AAAA",'),
    *(b'{"type":"start"}', b'{"type":"end"}', b'"encoding":"wav"', b'"rate_hz":', b"RIFF", b"WAVE", b"fmt ", b"data"),
    *(b"\x82\xfe", b"\x82\xff", b"\x81\x80", b"\x01\x81", b"\x80\x81", b"\x88\x82", b"\x89\x80"),
    *(b"gzip", b"deflate", b"identity", b";q=0", b"image/png", b"application/json", b"application/octet-stream"),
)  # fmt: skip


def seeds_of(name: str) -> list[bytes]:
    """The corpus of a target, in the order of the files' names."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def mutations(seeds: Sequence[bytes], chance: random.Random) -> Iterator[bytes]:
    """Generate mutated seeds without end."""
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 3, 5, 8))):
            _change(data, seeds, chance)
        yield bytes(data[:MOST_BYTES])


def _change(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randint(0, len(data))
    end = min(len(data), start + chance.choice((0, 1, 1, 2, 4, 16, 64, 1024)))
    match chance.randrange(7):
        case 0:
            data[start:end] = b""
        case 1:
            data[start:end] = chance.choice(TOKENS)
        case 2:
            data[start:end] = chance.randbytes(end - start)
        case 3:
            data[start:start] = data[start:end] * chance.choice((1, 2, 30))
        case 4:
            other = chance.choice(seeds)
            data[start:] = other[chance.randint(0, len(other)) :]
        case 5:
            nested = chance.choice((1, 200, 990, 1020))
            data[start:end] = b"[" * nested + data[start:end] + b"]" * nested
        case _:
            if start < len(data):
                data[start] ^= 1 << chance.randrange(8)
