"""JSON is bounded by what its spec can hold, before it is parsed."""

import time

import orjson
import pytest

from penstock.core.dim import Dim
from penstock.core.errors import TooLarge
from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec
from penstock.serve.exchange.json_bound import OTHER_VALUES, QUICK_BYTES, check_json, size_of

PICTURE = TensorSpec(dtype="float32", shape=(20, 30, 40), meaning="a picture", name="picture")
TOKENS = TensorSpec(dtype="int32", shape=(Dim("length", 500),), meaning="tokens", name="tokens")
NUMBER = TensorSpec(dtype="float32", shape=(), meaning="a number", name="number")


@pytest.mark.parametrize("indent", [False, True])
@pytest.mark.parametrize("spec", [PICTURE, TOKENS, NUMBER, RecordSpec((PICTURE, TOKENS, NUMBER))])
def test_what_fits_the_spec_is_never_too_large(spec: TensorSpec | RecordSpec, indent: bool) -> None:
    def numbers(shape: tuple[int, ...]) -> object:
        return -1.7976931348623157e308 if not shape else [numbers(shape[1:])] * int(shape[0])

    row = (
        {each.name: numbers(each.shape) for each in spec.tensors}
        if isinstance(spec, RecordSpec)
        else numbers(spec.shape)
    )
    for rows in (1, 100):
        text = orjson.dumps({"inputs": [row] * rows}, option=orjson.OPT_INDENT_2 if indent else None)
        check_json(text, spec, rows)
        assert len(text) <= size_of(spec, rows).nbytes


@pytest.mark.parametrize("item", [b"[],", b"{},", b"0,", b'"",', b"[[[]]],"])
def test_what_holds_more_than_the_spec_is_rejected_without_being_parsed(item: bytes) -> None:
    text = b"[" + item * (8_000_000 // len(item)) + b"0]"
    start_s = time.thread_time()
    with pytest.raises(TooLarge, match=r"lists or objects|strings or more"):
        check_json(text, TOKENS, 8)
    # 50 to 500 ms to parse on the machine where this takes 10 to 30; strings are looked for.
    assert time.thread_time() - start_s < 2


@pytest.mark.parametrize("between", [b" ", b"\0", b"\n", b"1"])
def test_bytes_that_are_no_values_are_bounded(between: bytes) -> None:
    check_json(b'{"id":"' + between * 400_000 + b'","inputs":[1]}', TOKENS, 8)
    with pytest.raises(TooLarge, match="outside its strings"):
        check_json(b'{"id":"x","inputs":[' + between * 100_000 + b"]}", TOKENS, 8)


@pytest.mark.parametrize("end", range(0, 200_000, 7_919))
def test_the_beginning_of_what_fits_is_never_too_large(end: int) -> None:
    row = {"picture": [[[0.123456789] * 40] * 30] * 20, "tokens": [12] * 500, "number": 1.5, "note": '\\",[{' * 50}
    text = orjson.dumps({"inputs": [row] * 2}, option=orjson.OPT_INDENT_2)
    check_json(text[:end], RecordSpec((PICTURE, TOKENS, NUMBER)), 2)


def test_brackets_and_commas_in_strings_are_not_counted() -> None:
    text = orjson.dumps(['[[,,\\"[,{' * 10_000])
    assert len(text) > QUICK_BYTES
    check_json(text, TOKENS, 1)
    with pytest.raises(TooLarge):
        check_json(text[:-1] + b",0" * 2 * OTHER_VALUES + b',"'.ljust(2_000, b",") + b'"]', TOKENS, 1)
