"""A served chain: its answers over every protocol, what it rejects, and parts that fail, go and come back."""

import http.client
import json
import socket
import struct
import subprocess
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Client, load_chain
from penstock.bench.process_usage import worker_pids
from tests.integration.test_tracing import Receiver, attributes
from tests.support.chained import CHAIN, Chained, answer, picture, write_chained
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer, serve_command

JSON = {"Content-Type": "application/json"}
PATH = "/v1/apps/look"
MARKS = [(1, 1), (4, 5), (7, 7)]


def body(*marks: tuple[int, int], **made: int) -> bytes:
    return json.dumps(picture(*marks, **made).tolist()).encode()


def ask(server: RunningServer, *marks: tuple[int, int], headers: dict[str, str] | None = None, **made: int) -> Any:
    status, _, reply = server.ask("POST", PATH, body(*marks, **made), JSON | (headers or {}))
    return reply if status == 200 else (status, reply["error"])


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Chained:
    return write_chained(tmp_path_factory.mktemp("chained"), partial=False)


@pytest.fixture(scope="module")
def server(chained: Chained) -> Iterator[RunningServer]:
    with RunningServer(None, *chained.arguments, "--frontends", "0", "--log-requests") as server:
        yield server


def test_every_protocol_gives_the_answer_of_the_loaded_chain(server: RunningServer, chained: Chained) -> None:
    predictor = load_chain(chained.chain, chained.bundles)
    with Client(f"http://{server.host}:{server.port}") as client:
        for marks in ([], MARKS[:1], MARKS):
            expected = predictor.predict(picture(*marks))
            assert expected["weights"].tolist() == answer(*marks)
            found = client.predict("look", picture(*marks))
            assert found["weights"].tolist() == expected["weights"].tolist()
            assert client.ask("look", picture(*marks)) == {name: array.tolist() for name, array in expected.items()}
        several = client.predict("look", np.stack([picture(), picture(*MARKS), picture((2, 2))]))
        assert [each["weights"].tolist() for each in several] == [[], answer(*MARKS), answer((2, 2))]
        (described,) = (app for app in client.apps() if app["name"] == "look")
    assert described["parts"] == ["marks", "weigh", "scale"]
    assert described["bundle"] == predictor.content_hash
    inputs = [{"name": "picture", "datatype": "UINT8", "shape": [8, 8], "data": picture(*MARKS).ravel().tolist()}]
    reply = server.ask("POST", "/v2/models/look/infer", json.dumps({"inputs": inputs}).encode())[2]
    assert {each["name"]: each["data"] for each in reply["outputs"]} == {
        "weights": answer(*MARKS),
        "missing": [False] * 3,
        "found": [3],
    }


def test_the_examples_of_a_chain_are_those_of_its_first_part(server: RunningServer) -> None:
    of_chain, of_part = (server.ask("GET", f"/v1/apps/{name}/examples")[2]["examples"] for name in ("look", "marks"))
    requests = [(each["content_type"], each["body"]) for each in of_part]
    assert len(requests) == 2
    assert [(each["content_type"], each["body"]) for each in of_chain] == requests
    # What was recorded of the part is no answer of the chain.
    assert [each["outputs"] for each in of_chain] == [None] * 2
    assert all(each["outputs"] for each in of_part)
    for each in of_chain:
        status, _, reply = server.ask("POST", PATH, b64decode(each["body"]), {"Content-Type": each["content_type"]})
        assert status == 200
        assert set(reply) == {"weights", "missing"}


def test_the_chain_and_each_part_have_metrics_of_their_own(server: RunningServer) -> None:
    def counts() -> dict[str, float]:
        text = server.ask("GET", "/metrics")[2].decode()
        lines = [line.rpartition(" ") for line in text.splitlines()]
        return {name: float(value) for name, _, value in lines if 'answered"' in name or "latency_seconds_c" in name}

    before = counts()
    assert ask(server, *MARKS)["weights"] == answer(*MARKS)
    rise = {name: value - before.get(name, 0) for name, value in counts().items()}
    assert rise['penstock_requests_total{app="look",outcome="answered"}'] == 1
    assert rise['penstock_requests_total{app="marks",outcome="answered"}'] == 1
    # A request of the part for each mark.
    assert rise['penstock_requests_total{app="weigh",outcome="answered"}'] == 3
    assert rise['penstock_chain_latency_seconds_count{app="look"}'] == 1
    assert rise['penstock_latency_seconds_count{app="weigh",engine="0"}'] == 3
    stats = server.ask("GET", "/v1/stats")[2]["models"]["look"]
    assert sum(stats["latency"]["counts"]) == stats["answered"]


def test_bad_input_is_the_clients_and_a_failing_part_is_named(server: RunningServer) -> None:
    assert server.ask("POST", PATH, b"[1, 2]", JSON)[0] == 400
    assert server.ask("POST", PATH, b"{", JSON)[0] == 400
    # A form with the one input as a part is an input too.
    part = b'--x\r\nContent-Disposition: form-data; name="picture"\r\n\r\n' + body((1, 1)) + b"\r\n--x--\r\n"
    form = server.ask("POST", PATH, part, {"Content-Type": "multipart/form-data; boundary=x"})
    assert (form[0], form[2]["weights"]) == (200, answer((1, 1)))
    assert server.ask("POST", PATH, b"", {"Content-Type": "multipart/form-data"})[0] == 400
    assert server.ask("GET", f"{PATH}/stream")[0] == 400
    # 13 makes the network raise, 17 gives NaN.
    status, sentence = ask(server, (1, 1), around=13)
    assert (status, sentence[:14]) == (500, "Part 'weigh': ")
    status, sentence = ask(server, (1, 1), around=17)
    assert (status, "NaN" in sentence) == (500, True)
    steps = server.ask("GET", "/v1/stats")[2]["models"]["look"]["steps"]
    assert steps["weigh"]["failed"] == 2
    assert steps["marks"]["failed"] == 0
    assert ask(server, *MARKS)["weights"] == answer(*MARKS)


def test_a_budget_shorter_than_all_networks_together_is_refused(server: RunningServer) -> None:
    status, sentence = ask(server, headers={"Penstock-Latency-Ms": "0.001"})
    assert status == 504
    assert sentence.startswith("A budget of 0.001 ms is shorter than the own time of the chain's networks")


@pytest.mark.slow
def test_a_part_missing_at_the_start_ends_the_server_with_one_sentence(chained: Chained) -> None:
    for frontends in ("0", "1"):
        command = serve_command(chained.marks, str(chained.chain), "--frontends", frontends)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert ended.stderr.strip() == (
            "penstock: Chain 'look' needs the application 'weigh', which is not there; there is 'marks'. Name its "
            "bundle too."
        )


@pytest.mark.slow
def test_a_deadline_in_the_middle_rejects_the_request_with_the_parts_name(tmp_path: Path) -> None:
    chained = write_chained(tmp_path, sleep_s=0.15)
    options = ("--frontends", "0", "--latency-ms", "400", "--max-batch", "1")
    with RunningServer(None, *chained.arguments, *options) as server:
        assert ask(server, (1, 1))["weights"] == answer((1, 1))
        # Three rows, one after another, take longer than the budget: each is admitted or rejected on its own.
        for _ in range(3):
            begin_s = time.monotonic()
            status, sentence = ask(server, *MARKS, (2, 2), (6, 1))
            assert status == 503
            assert "'weigh'" in sentence
            # It is rejected before the time is spent.
            assert time.monotonic() - begin_s < 1.0
        steps = server.ask("GET", "/v1/stats")[2]["models"]["look"]["steps"]
        assert steps["weigh"]["refused"] + steps["weigh"]["expired"] >= 1


@pytest.mark.slow
def test_a_partial_answer_marks_the_chunks_that_were_rejected(tmp_path: Path) -> None:
    chained = write_chained(tmp_path, sleep_s=0.1, partial=True)
    options = ("--frontends", "0", "--latency-ms", "450", "--max-batch", "1")
    with RunningServer(None, *chained.arguments, *options) as server:
        marks = [*MARKS, (2, 2), (6, 1), (0, 7)]
        found = ask(server, *marks)
    assert isinstance(found, dict), found
    assert any(found["missing"])
    assert not all(found["missing"])
    expected = [0.0 if missing else weight for missing, weight in zip(found["missing"], answer(*marks), strict=True)]
    assert found["weights"] == expected


@pytest.mark.slow
def test_a_client_that_leaves_cancels_the_rest(tmp_path: Path) -> None:
    # So long that eight rows wait for seconds, also if this test comes to it late.
    chained = write_chained(tmp_path, sleep_s=0.7)
    options = ("--frontends", "1", "--max-batch", "1", "--latency-ms", "60000")
    with RunningServer(None, *chained.arguments, *options) as server:

        def in_use() -> int:
            models = server.ask("GET", "/v1/stats")[2]["models"]
            return models["weigh"]["slots"]["in_use"]

        connection = http.client.HTTPConnection(server.host, server.port)
        connection.request("POST", PATH, body(*[(row, 3) for row in range(8)]), JSON)
        eventually(lambda: in_use() > 3, within_s=10)
        # A reset: a client that only ends its own side still gets its answer.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        eventually(lambda: in_use() == 0, within_s=5)
        answered = server.ask("GET", "/v1/stats")[2]["models"]["weigh"]["answered"]
        assert answered < 8


def crash(server: RunningServer) -> tuple[int, str | None]:
    """End the process of a chain's network; return the status of readiness, and why the chain is loading, if it is."""
    eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
    # A pixel of 19 ends the process of the network, in the second step.
    status, sentence = ask(server, (1, 1), around=19)
    assert (status, sentence[:14]) == (503, "Part 'weigh': "), sentence
    ready = server.ask("GET", "/v2/health/ready")[0]
    (state,) = (each for each in server.ask("POST", "/v2/repository/index")[2] if each["name"] == "look")
    return ready, state["reason"] if state["state"] == "LOADING" else None


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_fails_only_its_requests_and_comes_back(chained: Chained) -> None:
    with RunningServer(None, *chained.arguments, "--frontends", "2") as server:
        assert ask(server, *MARKS)["weights"] == answer(*MARKS)
        # The engine may be back before it is asked for, or the front-end that answers may not know yet.
        statuses, reasons = zip(*(crash(server) for _ in range(4)), strict=True)
        assert 503 in statuses
        assert any(reasons)
        assert all("(part 'marks')" in reason for reason in reasons if reason is not None), reasons
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=30)
        assert ask(server, *MARKS)["weights"] == answer(*MARKS)
        # A front-end that was restarted serves the chain too, and the counts go on.
        kill(server, "front-end 0")
        kill(server, "front-end 1")
        eventually(lambda: len(worker_pids(server.process.pid)) == 3, within_s=20)

        def right() -> bool:
            try:
                return ask(server, *MARKS)["weights"] == answer(*MARKS)
            except (OSError, http.client.HTTPException, TypeError):
                return False

        eventually(right, within_s=20)
        assert server.ask("GET", "/v1/stats")[2]["models"]["look"]["answered"] >= 3


@pytest.mark.slow
def test_parts_are_replaced_unloaded_and_loaded_under_a_chain(tmp_path: Path) -> None:
    for name in ("made", "other"):
        (tmp_path / name).mkdir()
    chained, other = write_chained(tmp_path / "made"), write_chained(tmp_path / "other")
    models = tmp_path / "models"
    for bundle in chained.bundles:
        version = models / bundle.parent.name / "1"
        version.parent.mkdir(parents=True)
        version.symlink_to(bundle)
    with RunningServer(None, str(chained.chain), "--models", str(models), "--frontends", "1") as server:

        def change(name: str, verb: str) -> int:
            return server.ask("POST", f"/v2/repository/models/{name}/{verb}", b"")[0]

        before = server.ask("GET", "/v1/apps")[2]["apps"]
        (models / "scale" / "2").symlink_to(other.scale)
        assert change("scale", "load") == 200
        assert ask(server, *MARKS)["weights"] == answer(*MARKS)
        assert {app["name"] for app in server.ask("GET", "/v1/apps")[2]["apps"]} == {app["name"] for app in before}
        assert change("weigh", "unload") == 200
        status, sentence = ask(server, *MARKS)
        assert (status, sentence[:14]) == (503, "Part 'weigh': ")
        assert server.ask("GET", "/v2/health/ready")[0] == 200
        (state,) = (each for each in server.ask("POST", "/v2/repository/index")[2] if each["name"] == "look")
        assert state["state"] == "UNAVAILABLE"
        assert change("weigh", "load") == 200
        assert ask(server, *MARKS)["weights"] == answer(*MARKS)
        # A version that does not fit is refused, and the one before serves on.
        (models / "weigh" / "3").symlink_to(other.marks)
        status, _, reply = server.ask("POST", "/v2/repository/models/weigh/load", b"")
        assert status == 400
        assert (
            "Chain 'look' needs 'weigh' with the input float32[2, 2], and this bundle has uint8[8, 8]" in reply["error"]
        )
        assert ask(server, *MARKS)["weights"] == answer(*MARKS)


def test_many_clients_at_once_get_their_own_answers(server: RunningServer) -> None:
    rng = np.random.default_rng(0)
    wrong: list[Any] = []

    def client(seed: int) -> None:
        for _ in range(10):
            places = rng.permutation(64)[: int(rng.integers(0, 8))]
            marks = [(int(place) // 8, int(place) % 8) for place in places]
            found = ask(server, *marks)
            if not isinstance(found, dict) or found["weights"] != answer(*marks):
                wrong.append((marks, found))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_grpc_serves_the_chain_and_its_span_has_the_steps(chained: Chained) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    receiver = Receiver()
    options = ["--frontends", "0", "--grpc-port", "0", "--otlp-endpoint", receiver.url, "--trace-share", "1"]
    with RunningServer(None, *chained.arguments, *options) as server:
        assert server.process.stdout is not None
        port = int(server.process.stdout.readline().rpartition(" ")[2])
        client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_model_ready("look")
        assert [each.name for each in client.get_model_metadata("look").outputs] == ["weights", "missing", "found"]
        given = grpc.InferInput("picture", [1, 8, 8], "UINT8")
        given.set_data_from_numpy(picture(*MARKS)[None])
        found = client.infer("look", [given])
        assert found.as_numpy("weights").tolist() == [answer(*MARKS)]
        assert found.as_numpy("found").tolist() == [3]
        (statistics,) = client.get_inference_statistics("look").model_stats
        assert statistics.inference_count == 1
        server.stop()
        assert server.process.wait(20) == 0
    receiver.close()
    (call,) = [span for span in receiver.spans if span.name.endswith("/ModelInfer")]
    steps = [span for span in receiver.spans if span.parent_span_id == call.span_id]
    assert len(steps) == sum("penstock.step" in attributes(span) for span in receiver.spans) > 1


@pytest.mark.slow
def test_a_functions_error_is_in_the_log_and_not_in_the_answer(chained: Chained, tmp_path: Path) -> None:
    text = CHAIN.format(partial=False)
    text = text.replace("    missing = [", "    assert len(picture) == 9, 'secret'\n    missing = [")
    (tmp_path / "chain.py").write_text(text)
    with RunningServer(None, *map(str, chained.bundles), str(tmp_path / "chain.py"), "--frontends", "0") as server:
        status, sentence = ask(server, *MARKS)
        assert (status, sentence) == (
            500,
            "The join of chain 'look' failed on this input; the server's log says how.",
        )
        assert "AssertionError: secret" in server.log()
