"""Two inputs and three outputs of varying length: unmodified clients of Triton, plain requests, ours, and bad input."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import penstock
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.golden_target import golden_target
from penstock.core.errors import BenchError, TooLarge
from penstock.core.spec import Array
from tests.support.processes import eventually
from tests.support.serving import RunningServer
from tests.support.text import MAX_TOKENS, texts, write_text

with warnings.catch_warnings():
    # gevent, which the client brings, warns at import about its own use of deprecated names.
    warnings.simplefilter("ignore")
    import tritonclient.http

# The clients are not typed.
TRITON: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
ASK = "/v1/apps/text"
Example = dict[str, Array]


@dataclass(kw_only=True)
class Served:
    """A server of the text network, and the same network in this process."""

    server: RunningServer
    url: str
    addresses: dict[str, str]
    bundle: Path
    predictor: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = write_text(tmp_path_factory.mktemp("text"))
    with RunningServer(bundle, "--grpc-port", "0") as server:
        assert server.process.stdout is not None
        grpc_port = server.process.stdout.readline().split()[-1]
        address = f"127.0.0.1:{server.port}"
        addresses = {"http": address, "grpc": f"127.0.0.1:{grpc_port}"}
        predictor = penstock.load(bundle)
        yield Served(server=server, url=f"http://{address}", addresses=addresses, bundle=bundle, predictor=predictor)


def infer(served: Served, protocol: str, given: list[tuple[str, str, Array]], **options: Any) -> dict[str, Array]:
    """Send tensors (name, datatype, values) with Triton's client; returns the outputs by name."""
    triton = TRITON[protocol]
    inputs: list[Any] = []
    for name, datatype, values in given:
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, **({"binary_data": False} if options.get("as_json") else {}))
        inputs.append(tensor)
    outputs = [triton.InferRequestedOutput(name) for name in options.get("outputs", ())]
    client = triton.InferenceServerClient(served.addresses[protocol])
    try:
        result = client.infer("text", inputs, outputs=outputs or None)
    finally:
        client.close()
    names = options.get("outputs") or ("logits", "tags", "multiples", "found")
    return {name: result.as_numpy(name) for name in names}


def tensors(example: Example) -> list[tuple[str, str, Array]]:
    return [(name, "INT64", array) for name, array in example.items()]


def batch_of(examples: list[Example]) -> Example:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


@pytest.mark.parametrize("protocol", TRITON)
def test_the_models_tensors_are_described(served: Served, protocol: str) -> None:
    client = TRITON[protocol].InferenceServerClient(served.addresses[protocol])
    metadata: Any = client.get_model_metadata("text", **({"as_json": True} if protocol == "grpc" else {}))
    client.close()
    found = {tensor["name"]: list(map(int, tensor["shape"])) for tensor in metadata["inputs"] + metadata["outputs"]}
    assert found == {
        "input_ids": [-1, -1],
        "attention_mask": [-1, -1],
        "logits": [-1, 3],
        "tags": [-1, -1, 2],
        "multiples": [-1, -1],
        "found": [-1],
    }


@pytest.mark.parametrize("protocol", TRITON)
@pytest.mark.parametrize("tokens", [1, 2, 7, MAX_TOKENS])
def test_a_batch_of_any_length_is_answered_as_in_this_process(served: Served, protocol: str, tokens: int) -> None:
    examples = texts(tokens) + [example | {"input_ids": (example["input_ids"] + 1) % 100} for example in texts(tokens)]
    found = infer(served, protocol, tensors(batch_of(examples)))
    for row, expected in enumerate(served.predictor.predict(examples)):
        count = int(found["found"][row])
        np.testing.assert_array_equal(found["multiples"][row, :count], expected["multiples"])
        assert not found["multiples"][row, count:].any()
        for name in ("logits", "tags"):
            np.testing.assert_allclose(found[name][row], expected[name], atol=1e-5)


@pytest.mark.parametrize(("protocol", "as_json"), [("http", False), ("http", True), ("grpc", False)])
def test_one_row_without_a_batch_dimension_and_some_outputs(served: Served, protocol: str, as_json: bool) -> None:
    example = texts(5)[0]
    # The order of the inputs is free.
    found = infer(served, protocol, tensors(example)[::-1], outputs=("tags",), as_json=as_json)
    assert found["tags"].shape == (5, 2)
    np.testing.assert_allclose(found["tags"], served.predictor.predict(example)["tags"], atol=1e-5)


def test_plain_json_by_name(served: Served) -> None:
    for example in texts(1, 4, MAX_TOKENS):
        body = json.dumps({name: array.tolist() for name, array in example.items()}).encode()
        status, _, reply = served.server.ask("POST", ASK, body, JSON)
        assert status == 200, reply
        for name, expected in served.predictor.predict(example).items():
            np.testing.assert_allclose(reply[name], expected, atol=1e-5)


@pytest.mark.thorough
def test_our_client_takes_texts_of_several_lengths(served: Served) -> None:
    examples = texts(3, 5, 3, MAX_TOKENS, 1)
    with penstock.Client(served.url) as client:
        found = client.predict("text", examples)
        with pytest.raises(TooLarge, match="Split it"):
            client.predict("text", texts(MAX_TOKENS) * (100_000 // MAX_TOKENS))
        assert client.apps()[0]["accepts"] == ["application/json"]
    for given, expected in zip(found, served.predictor.predict(examples), strict=True):
        for name, array in expected.items():
            assert given[name].dtype == array.dtype
            np.testing.assert_allclose(given[name], array, atol=1e-5)


@pytest.mark.parametrize("body", ["raw", "json"])
def test_a_load_of_golden_examples_is_compared_tensor_by_tensor(served: Served, body: str) -> None:
    target = golden_target(served.url, served.bundle, body)

    def measured() -> bool:
        result = measure(target, Load(rate=None, connections=2, seconds=0.3, warm_up_s=0.1))
        assert result.checked == result.latency_s.size
        return result.latency_s.size > 5

    eventually(measured, within_s=30)
    with pytest.raises(BenchError, match="cannot be sent as 'png'; choose raw or json"):
        golden_target(served.url, served.bundle, "png")


@pytest.mark.thorough
def test_front_ends_and_engine_in_processes_of_their_own(served: Served) -> None:
    examples = texts(3, 5, MAX_TOKENS)
    with RunningServer(served.bundle, "--frontends", "2") as server:
        with penstock.Client(f"http://127.0.0.1:{server.port}") as client:
            found = client.predict("text", examples)
        assert server.ask("POST", ASK, b'{"input_ids": [1], "attention_mask": []}', JSON)[0] == 400
    for given, expected in zip(found, served.predictor.predict(examples), strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(given[name], array, atol=1e-5)


def whole(count: int, dtype: str = "int64") -> Array:
    return np.ones(count, dtype)


# What is sent as input_ids and attention_mask, the datatype of the first, and a part of the sentence.
WRONG_LENGTHS: list[tuple[Array, Array, str, str]] = [
    (whole(0), whole(0), "INT64", "has 0 tokens; it must have from 1 to 12"),
    (whole(13), whole(13), "INT64", "has 13 tokens; it must have from 1 to 12"),
    (whole(3), whole(2), "INT64", "send both equally long"),
    (whole(3) * 100, whole(3), "INT64", "holds 100; it must be from 0 to 99"),
    (whole(3) * -1, whole(3), "INT64", "holds -1; it must be from 0 to 99"),
]
WRONG_TENSORS: list[tuple[Array, Array, str, str]] = [
    (whole(3, "float32"), whole(3), "FP32", "datatype is 'FP32'; 'input_ids' is INT64"),
    (whole(3)[None, None], whole(3), "INT64", "input_ids has "),
    (np.ones((2, 3), int), whole(3), "INT64", "has no batch dimension; give all the same, or none"),
    (np.ones((2, 3), int), np.ones((3, 3), int), "INT64", "different numbers of rows"),
]


@pytest.mark.parametrize("protocol", TRITON)
@pytest.mark.parametrize(("ids", "mask", "datatype", "sentence"), WRONG_LENGTHS + WRONG_TENSORS)
def test_wrong_tensors_over_the_protocol(
    served: Served, protocol: str, ids: Array, mask: Array, datatype: str, sentence: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(served, protocol, [("input_ids", datatype, ids), ("attention_mask", "INT64", mask)])
    refused(caught.value, protocol, sentence)


@pytest.mark.parametrize("protocol", TRITON)
@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["input_ids"], "'attention_mask' is missing"),
        (["input_ids", "attention_mask", "position_ids"], "no input 'position_ids'"),
        (["input_ids", "attention_mask", "input_ids"], "'input_ids' is given twice"),
    ],
)
def test_wrong_names_over_the_protocol(served: Served, protocol: str, names: list[str], sentence: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(served, protocol, [(name, "INT64", whole(3)) for name in names])
    refused(caught.value, protocol, sentence)


def refused(error: InferenceServerException, protocol: str, sentence: str) -> None:
    assert error.status() == {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}[protocol]
    assert sentence in error.message()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        *((json.dumps({"input_ids": ids.tolist(), "attention_mask": mask.tolist()}), sentence)
          for ids, mask, _, sentence in WRONG_LENGTHS),
        ('{"input_ids": [1]}', "'attention_mask' is missing"),
        ('{"input_ids": [1], "attention_mask": [1], "token_type_ids": [0]}', "no input 'token_type_ids'"),
        ('{"input_ids": [1], "attention_mask": [1], "input_ids": [2]}', "the input 'input_ids' twice"),
        ('{"input_ids": [1], "attention_mask": [1], "input\\u005fids": [2]}', "an input twice"),
        ('{"input_ids": [1.5], "attention_mask": [1]}', "input_ids holds 1.5; it must be a whole number"),
        ('{"input_ids": ["1"], "attention_mask": [1]}', "not only numbers"),
        ('{"input_ids": [1], "attention_mask": [true]}', "attention_mask holds a bool, not only numbers"),
        ('{"input_ids": [[1]], "attention_mask": [1]}', "has 2 dimensions"),
        ('{"input_ids": 1, "attention_mask": [1]}', "has 0 dimensions"),
        ("[1, 2, 3]", "by name"),
        ("null", "by name"),
        ('{"input_ids": [1', "not JSON"),
    ],
)  # fmt: skip
def test_wrong_plain_requests(served: Served, body: str, sentence: str) -> None:
    status, _, reply = served.server.ask("POST", ASK, body.encode(), JSON)
    assert status == 400
    assert sentence in reply["error"]


def test_forms_that_several_tensors_do_not_have(served: Served) -> None:
    status, _, reply = served.server.ask("POST", ASK, bytes(16), {"Content-Type": "application/octet-stream"})
    assert (status, "JSON by name" in reply["error"]) == (400, True)


def form(*parts: tuple[str, str, bytes], boundary: str = "b") -> bytes:
    """A multipart body of names, content types and contents."""
    heads = (f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\nContent-Type: {kind}\r\n\r\n'.encode()
             for name, kind, _ in parts)  # fmt: skip
    texts = b"".join(head + content + b"\r\n" for head, (_, _, content) in zip(heads, parts, strict=True))
    return texts + f"--{boundary}--\r\n".encode()


@pytest.mark.parametrize("raw", [(), ("input_ids",), ("input_ids", "attention_mask")])
def test_a_form_has_a_part_for_each_tensor(served: Served, raw: tuple[str, ...]) -> None:
    example = texts(5)[0]
    parts = [
        (name, "application/octet-stream", array.tobytes())
        if name in raw
        else (name, "application/json", json.dumps(array.tolist()).encode())
        for name, array in example.items()
    ]
    status, _, reply = served.server.ask("POST", ASK, form(*parts), FORM)
    assert status == 200, reply
    for name, expected in served.predictor.predict(example).items():
        np.testing.assert_allclose(reply[name], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (form(("input_ids", "", b"[1]")), "'attention_mask' is missing"),
        (form(("input_ids", "", b"[1]"), ("input_ids", "", b"[1]")), "'input_ids' twice"),
        (form(("input_ids", "", b"[1]"), ("ids", "", b"[1]")), "no input 'ids'"),
        (b"--b--", "'input_ids' is missing"),
        (b"--b", "not multipart/form-data that can be read"),
    ],
)
def test_a_wrong_form_is_refused_in_a_sentence(served: Served, body: bytes, sentence: str) -> None:
    status, _, reply = served.server.ask("POST", ASK, body, FORM)
    assert (status, sentence in reply["error"]) == (400, True), reply
