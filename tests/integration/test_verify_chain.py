"""`penstock verify` of a chain over HTTP and gRPC, and of a dense network with the tiles of a slide."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from penstock.apps.mitosis.slide_file import write_slide
from penstock.cli import build
from penstock.core.errors import PackError
from tests.support.chained import CHAIN, Chained, write_chained
from tests.support.dense import spotted, write_dense
from tests.support.page import url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.slow


# Examples of a bundle of random numbers.
GOLDEN = 3


class Places(NamedTuple):
    server: RunningServer
    options: list[str]


def serving(*arguments: str) -> Generator[Places]:
    with RunningServer(None, *arguments, "--frontends", "0", "--grpc-port", "0") as server:
        assert server.process.stdout is not None
        port = server.process.stdout.readline().split()[-1]
        yield Places(server, ["--server", url_of(server), "--grpc", f"127.0.0.1:{port}"])


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Chained:
    return write_chained(tmp_path_factory.mktemp("chained"))


@pytest.fixture(scope="module")
def places(chained: Chained) -> Iterator[Places]:
    yield from serving(*chained.arguments)


def verify(*words: str | Path) -> Result:
    return CliRunner().invoke(build(), ["verify", *map(str, words)], env={"COLUMNS": "160"})


def test_a_chain_is_compared_over_http_and_grpc(places: Places, chained: Chained) -> None:
    said = verify(chained.chain, *chained.bundles, *places.options)
    assert said.exit_code == 0, (said.output, said.exception)
    for place in ("server", "gRPC"):
        rows = [line for line in said.output.splitlines() if f" {place} " in line]
        assert sum(" weights " in row or " missing " in row for row in rows) == 2, said.output
        assert all(" 2 " in row for row in rows)


def test_another_chain_on_the_server_ends_with_1(places: Places, chained: Chained, tmp_path: Path) -> None:
    # Not halves but the weights themselves.
    other = tmp_path / "other.py"
    other.write_text(
        CHAIN.format(partial=False).replace('results["scale"]["halves"]', '2 * results["scale"]["halves"]')
    )
    said = verify(other, *chained.bundles, *places.options)
    assert said.exit_code == 1, (said.output, said.exception)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--pack", "x", "--server", "http://127.0.0.1:1"], "a chain has neither a pack nor a web app"),
        ([], "name a server of the chain with --server URL or --grpc HOST:PORT"),
    ],
)
def test_what_a_chain_does_not_have_is_refused(chained: Chained, options: list[str], sentence: str) -> None:
    said = verify(chained.chain, *chained.bundles, *options)
    assert isinstance(said.exception, PackError)
    assert sentence in str(said.exception)


def test_a_grpc_port_at_which_nobody_listens_is_said_at_once(chained: Chained) -> None:
    begun_s = time.monotonic()
    said = verify(chained.chain, *chained.bundles, "--grpc", "127.0.0.1:1")
    assert time.monotonic() - begun_s < 20
    assert "the server at 127.0.0.1:1 does not answer" in str(said.exception)
    assert "onnect" in str(said.exception)


def test_a_chain_has_no_pack(chained: Chained, tmp_path: Path) -> None:
    said = CliRunner().invoke(build(), ["export", str(chained.chain), "--out", str(tmp_path / "pack")])
    assert isinstance(said.exception, PackError)
    assert "a pack holds one network, so export the bundle of each part by itself" in str(said.exception)


def test_a_chain_without_one_of_its_bundles_is_refused(chained: Chained) -> None:
    said = verify(chained.chain, chained.marks, "--server", "http://127.0.0.1:1")
    assert "Chain 'look' needs the application 'weigh'" in str(said.exception)


def test_a_dense_network_is_compared_on_the_tiles_of_a_slide(tmp_path: Path) -> None:
    bundle = write_dense(tmp_path)
    write_slide(tmp_path / "slide.tif", spotted(60, 70, (30, 20), (50, 41)))
    Image.fromarray(np.full((40, 40, 3), 255, np.uint8)).save(tmp_path / "white.png")
    (tmp_path / "cut.tif").write_bytes((tmp_path / "slide.tif").read_bytes()[:200])
    exported = CliRunner().invoke(build(), ["export", str(bundle), "--out", str(tmp_path / "pack")])
    assert exported.exit_code == 0, (exported.output, exported.exception)
    files = [tmp_path / name for name in ("slide.tif", "white.png", "cut.tif")]
    with contextmanager(serving)(str(bundle)) as places:
        said = verify(bundle, *files, "--pack", tmp_path / "pack", *places.options, "--no-browser")
        assert said.exit_code == 0, (said.output, said.exception)
        for place in ("server", "gRPC", "Python engine"):
            (row,) = (line for line in said.output.splitlines() if f" {place} " in line)
            # More than the golden examples.
            assert int(row.split(place)[1].split()[1]) > GOLDEN, row
    assert "white.png: no tile was found that is not empty." in said.stderr
    assert "cut.tif: " in said.stderr
