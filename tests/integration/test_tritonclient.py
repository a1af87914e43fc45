"""tritonclient.http, unchanged, against the Open Inference Protocol's routes."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.serving import RunningServer, write_doubler

with warnings.catch_warnings():
    # gevent, which the client brings, warns at import about its own use of deprecated names.
    warnings.simplefilter("ignore")
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("triton"))) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4)
        yield client
        client.close()


def tensor(values: np.ndarray, *, binary: bool, name: str = "numbers") -> Any:
    given = triton.InferInput(name, list(values.shape), "FP32")
    given.set_data_from_numpy(values, binary_data=binary)
    return given


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("doubler")
    assert client.get_server_metadata()["extensions"][:1] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("doubler")
    assert metadata["inputs"] == [{"name": "numbers", "datatype": "FP32", "shape": [-1, 4]}]
    assert client.get_model_config("doubler")["input"][0]["data_type"] == "TYPE_FP32"
    assert [model["name"] for model in client.get_model_repository_index()] == ["doubler"]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_in_json_and_binary(client: Any, binary_in: bool, binary_out: bool) -> None:
    wanted = [triton.InferRequestedOutput("doubles", binary_data=binary_out)]
    result = client.infer("doubler", [tensor(ROWS, binary=binary_in)], outputs=wanted, request_id="seven")
    np.testing.assert_array_equal(result.as_numpy("doubles"), ROWS * 2)
    assert result.get_response()["id"] == "seven"


def test_without_named_outputs_and_without_a_batch_dimension(client: Any) -> None:
    np.testing.assert_array_equal(client.infer("doubler", [tensor(ROWS, binary=True)]).as_numpy("doubles"), ROWS * 2)
    single = client.infer("doubler", [tensor(ROWS[0], binary=True)]).as_numpy("doubles")
    np.testing.assert_array_equal(single, ROWS[0] * 2)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Any, algorithm: str) -> None:
    many = np.tile(ROWS, (30, 1))
    result = client.infer(
        "doubler",
        [tensor(many, binary=True)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("doubles"), many * 2)


def test_asynchronous_requests_meet_their_own_answers(client: Any) -> None:
    pending = [client.async_infer("doubler", [tensor(ROWS + 20 + n, binary=True)]) for n in range(20)]
    for n, request in enumerate(pending):
        np.testing.assert_array_equal(request.get_result().as_numpy("doubles"), (ROWS + 20 + n) * 2)


def test_statistics_count_the_rows(client: Any) -> None:
    before = client.get_inference_statistics("doubler")["model_stats"][0]["inference_count"]
    client.infer("doubler", [tensor(ROWS, binary=True)])
    assert client.get_inference_statistics("doubler")["model_stats"][0]["inference_count"] == before + 3


def test_a_timeout_of_ones_own_is_a_budget(client: Any) -> None:
    client.infer("doubler", [tensor(ROWS, binary=True)], timeout=10_000_000)
    with pytest.raises(InferenceServerException, match="shorter than the network's own time"):
        client.infer("doubler", [tensor(ROWS, binary=True)], timeout=1)


def test_mistakes_come_as_its_own_exceptions(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="no model 'nobody'"):
        client.infer("nobody", [tensor(ROWS, binary=True)])
    with pytest.raises(InferenceServerException, match="named 'other'"):
        client.infer("doubler", [tensor(ROWS, binary=True, name="other")])
    with pytest.raises(InferenceServerException, match="network failed"):
        client.infer("doubler", [tensor(np.full((1, 4), 13, np.float32), binary=True)])
