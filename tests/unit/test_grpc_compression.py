"""Compressed messages of gRPC, in bounded memory."""

import asyncio
import gzip
import random
import zlib

import pytest

from penstock.core.errors import InvalidInput, TooLarge
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.compression import FIRST_BYTES, STEP_BYTES, Unfolding, is_compressed

LARGE = 3 << 20
SIZES = (0, 1, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, FIRST_BYTES + STEP_BYTES, LARGE - 1, LARGE)


def unfolded(*messages: bytes) -> list[bytes | BaseException]:
    async def scene() -> list[bytes | BaseException]:
        unfolding = Unfolding(LARGE)
        return await asyncio.gather(*map(unfolding.unfolded, messages), return_exceptions=True)

    return asyncio.run(scene())


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_messages_of_every_size_up_to_the_largest(compress: type[bytes]) -> None:
    noise = random.Random(1).randbytes(LARGE)
    wanted = [noise[:size] for size in SIZES] + [bytes(size) for size in SIZES]
    assert unfolded(*map(compress, wanted)) == wanted


@pytest.mark.parametrize("level", range(10))
def test_every_level_is_seen(level: int) -> None:
    assert unfolded(zlib.compress(b"it", level), gzip.compress(b"it", level)) == [b"it", b"it"]


def test_what_is_too_large_or_damaged_is_the_clients_mistake() -> None:
    whole = gzip.compress(bytes(LARGE))
    larger, cut, longer, damaged, empty = unfolded(
        gzip.compress(bytes(LARGE + 1)), whole[:-9], whole + b"x", whole[:30] + b"\xff" * 30, b"\x1f\x8b"
    )
    assert isinstance(larger, TooLarge)
    for mistake in (cut, longer, damaged, empty):
        assert isinstance(mistake, InvalidInput)


def test_an_error_holds_nothing_of_what_was_unpacked() -> None:
    (error,) = unfolded(gzip.compress(bytes(LARGE + 1)))
    assert isinstance(error, TooLarge)
    held, trace = 0, error.__traceback__
    while trace is not None:
        held += sum(len(each) for each in trace.tb_frame.f_locals.values() if isinstance(each, bytes))
        trace = trace.tb_next
    assert held < FIRST_BYTES


def test_no_message_of_the_protocol_looks_compressed() -> None:
    """Field 15 as a number is what zlib's format begins with; a wire type 7, as gzip's, does not exist."""
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        field = message.fields_by_number.get(15)
        assert field is None or not message.name.endswith("Request"), message.name
    request = pb.ModelInferRequest(model_name="x", raw_input_contents=[b"\x1f\x8b\x08"])
    assert not is_compressed(request.SerializeToString())
    assert not is_compressed(b"")
    assert not is_compressed(b"\x78\x00")
