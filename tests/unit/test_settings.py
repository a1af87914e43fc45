"""Settings of a server: how they reach its processes, and which are refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ServeError
from penstock.serve.settings import (
    AccessSettings,
    BatchSettings,
    ExecutionSettings,
    LimitSettings,
    ModelSettings,
    NetworkSettings,
    Settings,
    TelemetrySettings,
)

MODELS = ModelSettings(bundles=(Path("bundle"),))


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(
        models=ModelSettings(bundles=(Path("one"), Path("two"))),
        network=NetworkSettings(tls_certificate=Path("c"), tls_key=Path("k"), port=0),
        access=AccessSettings(api_keys=Path("keys"), cors=("https://site.example", "*")),
        execution=ExecutionSettings(cache=Path("cache"), device="cpu,cpu"),
    )
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "site",
    ["*", "https://site.example", "http://localhost:5173", "http://[::1]:8080", "chrome-extension://abcdefgh"],
)
def test_what_a_browser_sends_as_origin_can_be_listed(site: str) -> None:
    assert AccessSettings(cors=(site,)).cors == (site,)


@pytest.mark.parametrize(
    "site",
    [
        "https://site.example/",
        "https://Site.example",
        "site.example",
        "https://site.example:443",
        "http://site.example:80",
        "https://user@site.example",
        "null",
        "https://*.example /x",
        "",
    ],
)
def test_what_no_browser_sends_is_not_silently_never_matched(site: str) -> None:
    with pytest.raises(ServeError, match="what a browser sends as Origin"):
        AccessSettings(cors=("https://good.example", site))


@pytest.mark.parametrize(
    ("record", "changes", "why"),
    [
        (ModelSettings, {}, "no bundle is named"),
        (ModelSettings, {"directory": Path("models"), "app": "app.py"}, "--app says where the application of one"),
        (NetworkSettings, {"port": 65_536}, "--port is 65536"),
        (NetworkSettings, {"grpc_port": -1}, "--grpc-port is -1"),
        (NetworkSettings, {"tls_key": Path("k")}, "TLS needs both"),
        (NetworkSettings, {"tls_certificate": Path("c")}, "TLS needs both"),
        (LimitSettings, {"max_connections": 0}, "--max-connections is 0"),
        (LimitSettings, {"max_headers": 7}, "--max-headers is 7"),
        (LimitSettings, {"idle_timeout_s": 0.0}, "--idle-timeout-s is 0 and .* must be above 0"),
        (LimitSettings, {"request_timeout_s": -1.0}, "--request-timeout-s is -1; both must be above 0"),
        (LimitSettings, {"watchdog_s": 2.9}, "--watchdog-s is 2.9; it must be at least 3"),
        (BatchSettings, {"latency_ms": 0.0}, "--latency-ms is 0; it must be above 0"),
        (BatchSettings, {"max_batch": 0}, "--max-batch is 0"),
        (TelemetrySettings, {"log_format": "xml"}, "--log-format is 'xml'"),
        (TelemetrySettings, {"otlp_endpoint": "host:4318"}, "--otlp-endpoint is 'host:4318'"),
        (TelemetrySettings, {"trace_share": 0.0}, "--trace-share is 0"),
        (ExecutionSettings, {"precision": "int8"}, "--precision is 'int8'"),
        (ExecutionSettings, {"device": "gpu"}, "--device is 'gpu'"),
        (ExecutionSettings, {"device": "cuda:0,auto"}, "--device is 'cuda:0,auto'"),
        (ExecutionSettings, {"device": "cuda:0,"}, "--device is 'cuda:0,'"),
        (ExecutionSettings, {"device": "cuda:0 cuda:1"}, "--device is 'cuda:0 cuda:1'"),
        (ExecutionSettings, {"device": ",".join(["cpu"] * 65)}, "--device names 65 devices"),
        (
            ExecutionSettings,
            {"device": "cpu,cuda:1", "executor": "onnx"},
            "--executor onnx is for a CPU, and --device is cpu,cuda:1",
        ),
    ],
)
def test_invalid_settings_are_refused_at_start(record: Any, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ServeError, match=why):
        record(**changes)


@pytest.mark.parametrize(
    ("device", "frontends", "why"),
    [
        ("cpu,cpu", 0, "--frontends is 0, and each of the 2 devices"),
        ("cpu", 65, "--frontends is 65; it must be from 0"),
    ],
)
def test_invalid_numbers_of_front_ends_are_refused(device: str, frontends: int, why: str) -> None:
    with pytest.raises(ServeError, match=why):
        Settings(models=MODELS, execution=ExecutionSettings(device=device), frontends=frontends)


def test_each_device_has_an_engine_and_several_engines_have_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ExecutionSettings(), ExecutionSettings(device="cpu,cpu")
    assert one.devices == ("auto",)
    assert ExecutionSettings(device="cuda:0,cuda:1,cpu").devices == ("cuda:0", "cuda:1", "cpu")
    for cores, alone, several in ((1, 0, 1), (2, 0, 1), (4, 2, 2), (64, 4, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert Settings(models=MODELS, execution=one).frontend_processes == alone
        assert Settings(models=MODELS, execution=two).frontend_processes == several
