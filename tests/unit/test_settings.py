"""What a server can be told, and what it says of what it cannot."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ServeError
from penstock.serve.settings import Settings


def settings(**changes: Any) -> Settings:
    return Settings(bundles=(Path("bundle"),), **changes)


def test_another_process_is_told_the_same() -> None:
    told = settings(
        api_keys=Path("keys"), cors=("https://site.example", "*"), tls_certificate=Path("c"), tls_key=Path("k")
    )
    assert Settings.from_json(told.to_json()) == told


@pytest.mark.parametrize(
    "site",
    ["*", "https://site.example", "http://localhost:5173", "http://[::1]:8080", "chrome-extension://abcdefgh"],
)
def test_what_a_browser_sends_as_origin_can_be_listed(site: str) -> None:
    assert settings(cors=(site,)).cors == (site,)


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
        settings(cors=("https://good.example", site))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls_key": Path("k")}, "TLS needs both"),
        ({"tls_certificate": Path("c")}, "TLS needs both"),
        ({"max_connections": 0}, "--max-connections is 0"),
        ({"max_headers": 7}, "--max-headers is 7"),
        ({"idle_s": 0.0}, "must be above 0"),
        ({"begun_s": -1.0}, "must be above 0"),
        ({"log_format": "xml"}, "--log-format is 'xml'"),
        ({"device": "gpu"}, "--device is 'gpu'"),
        ({"device": "cuda:0,auto"}, "--device is 'cuda:0,auto'"),
        ({"device": "cuda:0,"}, "--device is 'cuda:0,'"),
        ({"device": "cuda:0 cuda:1"}, "--device is 'cuda:0 cuda:1'"),
        ({"device": ",".join(["cpu"] * 65)}, "--device names 65 devices"),
        ({"device": "cpu,cpu", "frontends": 0}, "--frontends is 0, and each of the 2 devices"),
        ({"device": "cpu,cuda:1", "executor": "onnx"}, "--executor onnx is for a CPU, and --device is cpu,cuda:1"),
    ],
)
def test_what_cannot_be_is_refused_at_start(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ServeError, match=why):
        settings(**changes)


def test_each_device_has_an_engine_and_several_engines_have_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().devices == ("auto",)
    assert settings(device="cuda:0,cuda:1,cpu").devices == ("cuda:0", "cuda:1", "cpu")
    for cores, alone, several in ((1, 0, 1), (2, 0, 1), (4, 2, 2), (64, 4, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert settings().frontend_processes == alone
        assert settings(device="cpu,cpu").frontend_processes == several
