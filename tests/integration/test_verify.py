"""One bundle in all its places at once, and a pack on localhost."""

import json
import re
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import PackError
from penstock.core.packs.pack import Pack, read_pack
from penstock.export.static_host import pack_host
from tests.support.page import url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def hosted(pictures_pack: tuple[Pack, Path], tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A copy of the pack, with an index and a file that is none of it."""
    folder = shutil.copytree(pictures_pack[0].folder, tmp_path_factory.mktemp("hosted") / "pack")
    (folder / "index" / "thumbs").mkdir(parents=True)
    (folder / "index" / "items.json").write_text("[]")
    (folder / "notes.txt").write_text("not for everybody")
    return read_pack(folder)


@pytest.fixture(scope="module")
def port(hosted: Pack) -> Iterator[int]:
    """The port of a host of the pack."""
    with pack_host(hosted) as host:
        yield host.port


def asked(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_every_place_gives_the_same(pictures_pack: tuple[Pack, Path], tmp_path: Path) -> None:
    pack, bundle = pictures_pack
    picture = np.random.default_rng(1).integers(0, 255, (150, 90, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "one.jpg")
    (tmp_path / "broken.png").write_bytes(b"")
    with RunningServer(bundle) as server:
        command = ["verify", str(bundle), str(tmp_path), "--pack", str(pack.folder), "--server", url_of(server)]
        said = CliRunner().invoke(build(), command, env={"COLUMNS": "160"})
    assert said.exit_code == 0, (said.output, said.exception)
    for place in ("server", "Python engine", "web app"):
        (row,) = (line for line in said.output.splitlines() if f" {place} " in line)
        # The golden examples and the file.
        assert f" {pack.golden_count + 1} " in row
    assert "broken.png: " in said.stderr


def test_a_server_alone_is_compared_without_a_pack(pictures_pack: tuple[Pack, Path], digits_bundle: Path) -> None:
    for bundle in (pictures_pack[1], digits_bundle):
        with RunningServer(bundle) as server:
            said = CliRunner().invoke(build(), ["verify", str(bundle), "--server", url_of(server)])
        assert said.exit_code == 0, (said.output, said.exception)
        assert " server " in said.output
        assert "engine" not in said.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "name another place to compare with: .* --pack DIR, .* --server URL or --grpc HOST:PORT"),
        (["--server", "http://127.0.0.1:1", "--browser"], "the web app is of a pack; name the bundle's with --pack"),
    ],
)
def test_a_place_to_compare_with_is_named(digits_bundle: Path, options: list[str], sentence: str) -> None:
    said = CliRunner().invoke(build(), ["verify", str(digits_bundle), *options])
    assert isinstance(said.exception, PackError)
    assert re.search(sentence, str(said.exception))


def test_a_page_that_is_left_is_nothing_to_tell_of(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("/web/vendor/ort-wasm-simd-threaded.wasm.gzip", "//[x"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as page:
            page.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert page.recv(12) == (b"HTTP/1.1 404" if "[" in path else b"HTTP/1.1 200")
            # Closed like this, whoever still sends is told so at once.
            page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # By then they were told.
    for _ in range(3):
        assert asked(port, "/pack.json")[0] == 200
        time.sleep(0.05)
    assert not capfd.readouterr().err


def test_what_is_above_the_tolerance_ends_with_1(pictures_pack: tuple[Pack, Path]) -> None:
    pack, bundle = pictures_pack
    command = ["verify", str(bundle), "--pack", str(pack.folder), "--no-browser", "--tolerance"]
    assert CliRunner().invoke(build(), [*command, "0.001"]).exit_code == 0
    # Summed in another order, some probability has another last bit.
    assert CliRunner().invoke(build(), [*command, "0"]).exit_code == 1


def test_a_pack_of_another_bundle(pictures_pack: tuple[Pack, Path], digits_bundle: Path) -> None:
    pack, _ = pictures_pack
    said = CliRunner().invoke(build(), ["verify", str(digits_bundle), "--pack", str(pack.folder)])
    assert isinstance(said.exception, PackError)
    assert "of another bundle" in str(said.exception)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/web/", "text/html; charset=utf-8"),
        ("/web/app.js", "text/javascript; charset=utf-8"),
        ("/web/vendor/ort.wasm.min.mjs", "text/javascript; charset=utf-8"),
        ("/web/manifest.webmanifest", "application/manifest+json"),
        ("/pack.json?latest", "application/json"),
        ("/model.onnx", "application/octet-stream"),
        ("/index/items.json", "application/json"),
    ],
)
def test_a_host_says_what_each_file_is(port: int, path: str, kind: str) -> None:
    status, headers, content = asked(port, path)
    assert (status, headers["content-type"]) == (200, kind)
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-embedder-policy"] == "require-corp"
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-cache", "nosniff")
    assert int(headers["content-length"]) == len(content) > 0
    status, headers, content = asked(port, path, "HEAD")
    assert (status, content) == (200, b"")


def test_a_host_shows_the_whole_pack_and_nothing_else(port: int, hosted: Pack) -> None:
    assert asked(port, "/pack.json")[2] == (hosted.folder / "pack.json").read_bytes()
    assert all(asked(port, f"/{name}")[0] == 200 for name in json.loads(asked(port, "/pack.json")[2])["files"])
    assert asked(port, "/")[:1] == (302,)
    paths = ["/notes.txt", "/../bundle/manifest.json", "/web/../../x", "/index/../notes.txt", "/index/%2e%2e/notes.txt"]
    for path in [*paths, "/index/", "/index", "/web/none.js", "/%00", "/index/%00"]:
        assert asked(port, path)[0] == 404, path


def test_a_port_that_is_taken(port: int, pictures_pack: tuple[Pack, Path]) -> None:
    with pytest.raises(PackError, match=f"port {port} is not available"):
        pack_host(pictures_pack[0], port).start()
