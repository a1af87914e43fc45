"""tritonclient's shared memory, unchanged, against a server that takes it."""

import os
import socket
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.serving import RunningServer, write_doubler

with warnings.catch_warnings():
    # gevent, which the client brings, warns at import about its own use of deprecated names.
    warnings.simplefilter("ignore")
    import tritonclient.http

# The clients are not typed.
over_http: Any = tritonclient.http
over_grpc: Any = tritonclient.grpc
memory: Any = shared_memory

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
NBYTES = ROWS.nbytes
SHARED = ("--shared-memory", "1", "--grpc-port", "0")


def clients_of(server: RunningServer) -> dict[str, tuple[Any, Any]]:
    assert server.process.stdout is not None
    port = server.process.stdout.readline().split()[-1]
    return {
        "http": (over_http, over_http.InferenceServerClient(f"127.0.0.1:{server.port}")),
        "grpc": (over_grpc, over_grpc.InferenceServerClient(f"127.0.0.1:{port}")),
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def served(bundle: Path) -> Iterator[tuple[RunningServer, dict[str, tuple[Any, Any]]]]:
    with RunningServer(bundle, *SHARED) as server:
        clients = clients_of(server)
        yield server, clients
        for _, client in clients.values():
            client.close()
        assert "Traceback" not in server.log()


@pytest.fixture(params=["http", "grpc"])
def asked(served: tuple[RunningServer, dict[str, tuple[Any, Any]]], request: pytest.FixtureRequest) -> Iterator[Any]:
    module, client = served[1][request.param]
    yield module, client
    client.unregister_system_shared_memory()


@contextmanager
def made(name: str, nbytes: int) -> Generator[Any]:
    """A file in /dev/shm, `penstock-PROCESS-NAME`."""
    handle = memory.create_shared_memory_region(name, key_of(name), nbytes)
    try:
        yield handle
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            memory.destroy_shared_memory_region(handle)


def key_of(name: str) -> str:
    return f"penstock-{os.getpid()}-{name}"


def tensors(module: Any, offset: int = 0, *, nbytes: int = NBYTES, region: str = "region") -> list[Any]:
    given = module.InferInput("numbers", [3, 4], "FP32")
    given.set_shared_memory(region, nbytes, offset)
    return [given]


def outputs(module: Any, offset: int = NBYTES, *, nbytes: int = NBYTES) -> list[Any]:
    wanted = module.InferRequestedOutput("doubles")
    wanted.set_shared_memory("region", nbytes, offset)
    return [wanted]


def status_of(client: Any, name: str = "") -> dict[str, int]:
    found = client.get_system_shared_memory_status(name)
    regions = (
        found
        if isinstance(found, list)
        else [{"name": each.name, "byte_size": each.byte_size} for each in found.regions.values()]
    )
    return {each["name"]: each["byte_size"] for each in regions}


def test_inputs_and_outputs_in_shared_memory(asked: Any) -> None:
    module, client = asked
    metadata = client.get_server_metadata()
    assert "system_shared_memory" in (metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions)
    with made("both", 64 + 2 * NBYTES) as handle:
        client.register_system_shared_memory("region", key_of("both"), 2 * NBYTES, offset=64)
        assert status_of(client) == status_of(client, "region") == {"region": 2 * NBYTES}
        for turn in range(3):
            memory.set_shared_memory_region(handle, [ROWS / (turn + 1)], 64)
            result = client.infer("doubler", tensors(module), outputs=outputs(module))
            found = memory.get_contents_as_numpy(handle, np.float32, [3, 4], 64 + NBYTES)
            np.testing.assert_array_equal(found, ROWS / (turn + 1) * 2)
            said = result.get_output("doubles")
            assert list(said["shape"] if isinstance(said, dict) else said.shape) == [3, 4]
            del found
        np.testing.assert_array_equal(client.infer("doubler", tensors(module)).as_numpy("doubles"), ROWS / 3 * 2)
        client.unregister_system_shared_memory("region")
        assert status_of(client) == {}
        with pytest.raises(InferenceServerException, match="no shared memory region 'region'"):
            client.infer("doubler", tensors(module))


def test_what_lies_outside_of_a_region_or_has_another_size_is_refused(asked: Any) -> None:
    module, client = asked
    with made("bounds", 4096) as handle:
        memory.set_shared_memory_region(handle, [np.concatenate([ROWS, ROWS * 0 - 7])])
        client.register_system_shared_memory("region", key_of("bounds"), 2 * NBYTES)
        for given, wanted, sentence in (
            (tensors(module, 2 * NBYTES - 4), None, "do not lie in shared memory region 'region', which has 96"),
            (tensors(module, nbytes=1 << 40), None, "do not lie in"),
            (tensors(module, nbytes=NBYTES - 4), None, "shared_memory_byte_size is 44; 3 x"),
            (tensors(module, region="other"), None, "no shared memory region 'other'"),
            (tensors(module), outputs(module, nbytes=8), "has 48 bytes, and its part of shared memory region"),
            (tensors(module), outputs(module, 2 * NBYTES), "do not lie in"),
        ):
            with pytest.raises(InferenceServerException, match=sentence):
                client.infer("doubler", given, outputs=wanted)
        # Nothing was written.
        found = memory.get_contents_as_numpy(handle, np.float32, [3, 4], NBYTES)
        np.testing.assert_array_equal(found, ROWS * 0 - 7)
        del found


def test_registrations_that_are_refused(asked: Any, tmp_path: Path) -> None:
    _, client = asked
    with made("given", 4096):
        for name, key, size, offset, sentence in (
            ("a", "penstock-nobody", 8, 0, "no readable shared memory"),
            ("a", "../../etc/passwd", 8, 0, "name of a file in /dev/shm"),
            ("a", "..", 8, 0, "name of a file in /dev/shm"),
            ("a", key_of("given"), 4097, 0, "4,097 bytes from 0, and /dev/shm/.* has 4,096"),
            ("a", key_of("given"), 8, 4090, "8 bytes from 4,090"),
            ("a", key_of("given"), 0, 0, "0 bytes from 0"),
        ):
            with pytest.raises(InferenceServerException, match=sentence):
                client.register_system_shared_memory(name, key, size, offset=offset)
        client.register_system_shared_memory("a", f"/{key_of('given')}", 8)
        with pytest.raises(InferenceServerException, match="'a' is registered already"):
            client.register_system_shared_memory("a", key_of("given"), 8)
        with pytest.raises(InferenceServerException, match="no shared memory region 'b'"):
            client.get_system_shared_memory_status("b")
    # A link leads out of /dev/shm.
    (tmp_path / "secret").write_bytes(b"x" * 100)
    link = Path("/dev/shm") / key_of("link")
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(InferenceServerException, match="no readable shared memory"):
            client.register_system_shared_memory("b", key_of("link"), 8)
    finally:
        link.unlink()


def test_regions_have_a_budget(asked: Any) -> None:
    _, client = asked
    with made("large", 1 << 20), made("small", 4096):
        client.register_system_shared_memory("small", key_of("small"), 4096)
        with pytest.raises(InferenceServerException, match="1,048,576 bytes, and 1,044,480 of 1,048,576 are left"):
            client.register_system_shared_memory("large", key_of("large"), 1 << 20)
        client.unregister_system_shared_memory("small")
        client.register_system_shared_memory("large", key_of("large"), 1 << 20)


def test_a_file_that_is_truncated_or_unlinked_harms_no_server(asked: Any) -> None:
    module, client = asked
    with made("short", 1 << 16) as handle:
        memory.set_shared_memory_region(handle, [ROWS])
        client.register_system_shared_memory("region", key_of("short"), 1 << 16)
        place = Path("/dev/shm") / key_of("short")
        os.truncate(place, 0)
        for wanted in (None, outputs(module)):
            with pytest.raises(InferenceServerException, match="shorter than when it was registered"):
                client.infer("doubler", tensors(module), outputs=wanted)
        os.truncate(place, 1 << 16)
        memory.set_shared_memory_region(handle, [ROWS])
    # The file is gone, and the server has it open.
    result = client.infer("doubler", tensors(module), outputs=outputs(module))
    assert result is not None
    np.testing.assert_array_equal(client.infer("doubler", tensors(module)).as_numpy("doubles"), ROWS * 2)


def test_another_users_memory_is_refused(asked: Any) -> None:
    _, client = asked
    if os.getuid() != 0:
        pytest.skip("only root can make a file of another user")
    with made("theirs", 4096):
        os.chown(Path("/dev/shm") / key_of("theirs"), 12345, 12345)
        with pytest.raises(InferenceServerException, match="belongs to another user"):
            client.register_system_shared_memory("region", key_of("theirs"), 8)


def test_a_client_behind_a_proxy_or_elsewhere_is_refused(served: Any, bundle: Path) -> None:
    server, clients = served
    for header in ("X-Forwarded-For", "Forwarded", "Via"):
        status, _, body = server.ask("GET", "/v2/systemsharedmemory/status", headers={header: "for=10.0.0.1"})
        assert (status, "without a proxy" in body["error"]) == (403, True)
    with pytest.raises(InferenceServerException, match="without a proxy"):
        clients["grpc"][1].get_system_shared_memory_status(headers={"x-forwarded-for": "10.0.0.1"})
    # The machine's own address is not a loopback address: a client there may be anywhere.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            own = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no address but loopback")
    if own.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    with RunningServer(bundle, *SHARED, "--host", "0.0.0.0") as other:
        other.host = own
        assert other.ask("GET", "/v2/systemsharedmemory/status")[0] == 403


def test_paths_and_methods(served: Any) -> None:
    server, _ = served
    assert server.ask("GET", "/v2/systemsharedmemory/status")[2] == []
    for method, path, status, sentence in (
        ("POST", "/v2/systemsharedmemory/status", 405, "takes GET"),
        ("GET", "/v2/systemsharedmemory/unregister", 405, "takes POST"),
        ("POST", "/v2/systemsharedmemory/register", 404, "is none of them"),
        ("POST", "/v2/systemsharedmemory/region/a/other", 404, "is none of them"),
        ("POST", "/v2/cudasharedmemory/region/a/register", 404, "There is no"),
        ("POST", "/v2/systemsharedmemory/region/a/register", 400, ""),
    ):
        found, _, body = server.ask(method, path, b"[1]" if method == "POST" else None)
        assert (found, sentence in body["error"]) == (status, True), (path, body)


@pytest.mark.thorough
def test_every_front_end_knows_a_region_of_its_own_keys_alone(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {'a' * 32}\nbob {'b' * 32}\n")
    ann, bob = ({"authorization": f"Bearer {letter * 32}"} for letter in "ab")
    with RunningServer(bundle, *SHARED, "--frontends", "2", "--api-keys", str(keys)) as server, made("all", 4096) as at:
        memory.set_shared_memory_region(at, [ROWS])
        first = over_http.InferenceServerClient(f"127.0.0.1:{server.port}")
        first.register_system_shared_memory("region", key_of("all"), 4096, headers=ann)
        # Each connection goes to either front-end.
        for _ in range(12):
            client = over_http.InferenceServerClient(f"127.0.0.1:{server.port}")
            result = client.infer("doubler", tensors(over_http), headers=ann)
            np.testing.assert_array_equal(result.as_numpy("doubles"), ROWS * 2)
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                client.infer("doubler", tensors(over_http), headers=bob)
            assert client.get_system_shared_memory_status(headers=bob) == []
            client.unregister_system_shared_memory(headers=bob)
            client.close()
        first.unregister_system_shared_memory(headers=ann)
        for _ in range(6):
            client = over_http.InferenceServerClient(f"127.0.0.1:{server.port}")
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                client.infer("doubler", tensors(over_http), headers=ann)
            client.close()
        first.close()
