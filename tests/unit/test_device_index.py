"""The index of a folder's pictures, and the search in it."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.core.application import Application, reply_of
from penstock.core.chains.chain_run import ChainPlan, FunctionCall, PartRows
from penstock.core.chains.picture_search import search_chain
from penstock.core.errors import ApplicationError, InvalidInput, PackCorrupt, PackError, SourceError
from penstock.core.pictures.picture_index import IndexItem, PictureIndex, read_index
from penstock.core.record import RecordSpec
from penstock.core.source_files.find_application import find_chain
from penstock.core.spec import TensorSpec
from penstock.device.index import index_folder
from penstock.device.pack_engine import PackEngine
from penstock.device.picture_folder import read_picture
from penstock.device.search import embedding_of, search
from tests.support.packs import colour_pack, plain
from tests.support.pictures import picture_folder, save


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PackEngine:
    return PackEngine(colour_pack(tmp_path_factory.mktemp("pack")))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root = picture_folder(tmp_path / "pictures")
    (root / "broken.jpg").write_bytes(b"no picture")
    # Twice the same.
    shutil.copyfile(root / "cats" / "0.jpg", root / "again.jpg")
    return root


def by_hand(engine: PackEngine, root: Path, names: list[str], query: np.ndarray) -> list[tuple[str, float]]:
    """Brute force in float64, of equals the first."""
    vectors_ND = np.stack([embedding_of(engine, read_picture(root / name)) for name in names]).astype(np.float64)
    cosines = vectors_ND @ embedding_of(engine, query).astype(np.float64)
    return [(names[i], float(cosines[i])) for i in np.argsort(-cosines, kind="stable")[:5]]


def test_the_top_five_are_those_of_brute_force(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    made = index_folder(engine, pictures, tmp_path / "index")
    assert (made.count, made.computed, made.failures.count) == (13, 12, 1)
    assert "broken.jpg cannot be used: the file is not a picture" in made.failures.sentences[0]
    index = read_index(tmp_path / "index")
    names = [item.file for item in index.items]
    assert names == sorted(names)
    for name in names:
        query = read_picture(pictures / name)
        found = search(engine, index, query)
        assert [(one.item.file, pytest.approx(one.similarity)) for one in found] == by_hand(
            engine, pictures, names, query
        )
    twins = search(engine, index, read_picture(pictures / "cats" / "0.jpg"))[:2]
    assert [one.item.file for one in twins] == ["again.jpg", "cats/0.jpg"], "of equals, the first"
    assert [one.similarity for one in twins] == pytest.approx([1, 1])


def test_what_the_web_app_reads(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    index_folder(engine, pictures, tmp_path / "index")
    vectors_ND = np.load(tmp_path / "index" / "vectors.npy")
    items = json.loads((tmp_path / "index" / "items.json").read_bytes())
    assert (vectors_ND.shape, vectors_ND.dtype) == ((13, 3), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors_ND, axis=1), 1, atol=1e-6)
    for item in items:
        assert read_picture(tmp_path / "index" / item["thumbnail"]).shape[2] == 4
    assert {"file", "sha256", "thumbnail"} == set(items[0])


def index_of(vectors_ND: np.ndarray) -> PictureIndex:
    items = tuple(IndexItem(file=str(i), sha256="", thumbnail="") for i in range(len(vectors_ND)))
    return PictureIndex(items=items, vectors_ND=vectors_ND, model={})


@pytest.mark.parametrize(("count", "size"), [(1, 8), (4, 8), (5, 8), (3_000, 64)])
def test_the_search_is_exact(count: int, size: int) -> None:
    random = np.random.default_rng(count)
    # Some lie very near one another, some are the same: what an approximate search gets wrong.
    centres = random.standard_normal((max(count // 10, 1), size))
    vectors_ND = centres[random.integers(len(centres), size=count)] + 1e-4 * random.standard_normal((count, size))
    vectors_ND[count // 2 :] = vectors_ND[: count - count // 2]
    vectors_ND = (vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)).astype(np.float32)
    index = index_of(vectors_ND)
    for query in vectors_ND[:: max(count // 20, 1)]:
        cosines = (vectors_ND.astype(np.float64) * query).sum(1)
        order = np.argsort(-cosines, kind="stable")[:5]
        found = index.nearest(query)
        assert [one.item.file for one in found] == [str(i) for i in order]
        np.testing.assert_array_equal([one.similarity for one in found], cosines[order])


def test_a_hundred_equals_come_in_their_order() -> None:
    vectors_ND = np.tile(np.array([[0.6, 0.8]], np.float32), (100, 1))
    assert [one.item.file for one in index_of(vectors_ND).nearest(vectors_ND[0])] == ["0", "1", "2", "3", "4"]


class PowerCut(BaseException):
    """Ends everything."""


class Interrupted(PackEngine):  # pyright: ignore[reportGeneralTypeIssues]
    """Stops after some pictures."""

    left = 100

    def run(self, raw: np.ndarray) -> list[np.ndarray]:
        if self.left == 0:
            raise PowerCut
        self.left -= 1
        return super().run(raw)


def test_an_interrupted_index_goes_on_where_it_was(engine: PackEngine, tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / "p").mkdir(exist_ok=True)
        save(plain((number, 40, 90), 4, 4)[:, :, :3], tmp_path / "p" / f"{number:03}.png")
    stops = Interrupted(engine.pack)
    stops.left = 37
    with pytest.raises(PowerCut):
        index_folder(stops, tmp_path / "p", tmp_path / "index")
    assert not (tmp_path / "index").exists()
    # A vector that was cut when the power went.
    parts = list((tmp_path / "index-part" / "parts").glob("*/*"))
    assert len(parts) == 37
    os.truncate(parts[0], 5)
    made = index_folder(engine, tmp_path / "p", tmp_path / "index")
    assert (made.count, made.computed) == (64, 28)
    assert not (tmp_path / "index-part").exists()
    index = read_index(tmp_path / "index")
    for name in ("000.png", "040.png", "063.png"):
        assert search(engine, index, read_picture(tmp_path / "p" / name))[0].item.file == name


def test_the_small_pictures_of_an_index_are_not_indexed(engine: PackEngine, pictures: Path) -> None:
    for _ in range(2):
        assert index_folder(engine, pictures, pictures / "index").count == 13


def test_an_index_is_brought_up_to_date(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    index_folder(engine, pictures, tmp_path / "index")
    (pictures / "dogs" / "0.jpg").unlink()
    save(plain((250, 240, 3))[:, :, :3], pictures / "yellow.png")
    made = index_folder(engine, pictures, tmp_path / "index")
    assert (made.count, made.computed) == (13, 1)
    index = read_index(tmp_path / "index")
    files = [item.file for item in index.items]
    assert ("dogs/0.jpg" in files, "yellow.png" in files) == (False, True)
    assert search(engine, index, plain((250, 240, 3)))[0].item.file == "yellow.png"
    assert len(list((tmp_path / "index" / "thumbs").iterdir())) == 12


def test_an_index_of_another_network_is_refused_and_made_anew(
    engine: PackEngine, pictures: Path, tmp_path: Path
) -> None:
    index_folder(engine, pictures, tmp_path / "index")
    other = PackEngine(colour_pack(tmp_path / "other", rounds=1))
    with pytest.raises(PackError, match="the index was made by another network than that of the pack 'colours'"):
        search(other, read_index(tmp_path / "index"), plain((1, 2, 3)))
    assert index_folder(other, pictures, tmp_path / "index").computed == 12


@pytest.mark.parametrize("name", ["vectors.npy", "items.json", "index.json"])
def test_a_damaged_index_is_refused(engine: PackEngine, pictures: Path, tmp_path: Path, name: str) -> None:
    index_folder(engine, pictures, tmp_path / "index")
    file = tmp_path / "index" / name
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-3] + b"123"):
        file.write_bytes(damaged)
        with pytest.raises(PackCorrupt, match=r"the index .* cannot be read .*; remove it and make it again"):
            read_index(tmp_path / "index")


def test_packs_folders_and_pictures_that_cannot_be_indexed(engine: PackEngine, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="has no embedding to compare pictures by"):
        index_folder(PackEngine(colour_pack(tmp_path / "none", embedding=False)), tmp_path)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.png").write_bytes(b"no")
    with pytest.raises(SourceError, match=r"none of the 1 pictures of .* can be used; .*a\.png cannot be used"):
        index_folder(engine, tmp_path / "only", tmp_path / "index")
    with pytest.raises(PackError, match="is there and is no index; name another folder"):
        index_folder(engine, tmp_path / "only", tmp_path / "only")
    assert (tmp_path / "only" / "a.png").exists()
    with pytest.raises(SourceError, match="there is no folder"):
        index_folder(engine, tmp_path / "nowhere")
    with pytest.raises(PackError, match="is no index; 'penstock index PACK FOLDER' makes one"):
        read_index(tmp_path / "only")
    with pytest.raises(InvalidInput, match="so it has no direction"):
        embedding_of(engine, plain((0, 0, 0)))


def test_a_picture_whose_name_is_no_text_is_left_out(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    shutil.copyfile(pictures / "cats" / "0.jpg", os.fsencode(pictures) + b"/caf\xe9.jpg")
    made = index_folder(engine, pictures, tmp_path / "index")
    assert made.count == 13
    assert any("caf\\udce9.jpg' is not UTF-8; rename it." in said for said in made.failures.sentences)
    read_index(tmp_path / "index")


def test_a_full_disk_is_not_taken_for_broken_pictures(
    engine: PackEngine, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.device.index._write_thumbnail", full)
    with pytest.raises(PackError, match=r"cannot be written \(No space left"):
        index_folder(engine, pictures, tmp_path / "index")
    monkeypatch.undo()
    assert index_folder(engine, pictures, tmp_path / "index").count == 13


def test_two_at_once_do_not_write_one_index(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    refused = list[str]()

    def said(done: int, total: int) -> None:
        if done == 1:
            with pytest.raises(PackError, match="another 'penstock index' is at work") as caught:
                index_folder(engine, pictures, tmp_path / "index")
            refused.append(str(caught.value))

    assert index_folder(engine, pictures, tmp_path / "index", said).count == 13
    assert refused
    assert not list(tmp_path.glob("index-*"))


def test_an_index_goes_where_it_is_asked_for(
    engine: PackEngine, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    index_folder(engine, pictures, tmp_path / "real" / "index")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "index")
    assert index_folder(engine, pictures, tmp_path / "link").computed == 0
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackError, match="is there and is no index"):
        index_folder(engine, pictures, Path("."))
    (tmp_path / "only").mkdir()
    (tmp_path / "real" / "index").rename(tmp_path / "only" / "index")
    with pytest.raises(SourceError, match="no picture in it but those of the index"):
        index_folder(engine, tmp_path / "only", tmp_path / "only" / "index")


def test_an_index_that_names_other_files_is_refused(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index_folder(engine, pictures, index)
    listed = json.loads((index / "items.json").read_text())
    listed[0]["sha256"] = "../../elsewhere"
    (index / "items.json").write_text(json.dumps(listed))
    described = json.loads((index / "index.json").read_text())
    described["sha256"]["items.json"] = hashlib.sha256((index / "items.json").read_bytes()).hexdigest()
    (index / "index.json").write_text(json.dumps(described))
    with pytest.raises(PackCorrupt, match="no SHA-256"):
        read_index(index)


def test_a_search_is_a_chain_of_an_embedding_and_the_index(engine: PackEngine, pictures: Path, tmp_path: Path) -> None:
    index_folder(engine, pictures, tmp_path / "index")
    index = read_index(tmp_path / "index")
    chain = search_chain(tmp_path / "index", part="colours", count=3)
    part = Application(
        name="colours",
        input=TensorSpec(dtype="uint8", shape=(6, 6, 4), meaning="picture", name="picture"),
        output=TensorSpec(dtype="float32", shape=(3,), meaning="mean colour", name="embedding"),
        model=":none",
    )
    plan = ChainPlan(chain=chain, parts={"colours": part})
    query = read_picture(pictures / "cats" / "0.jpg")
    progress = plan.steps(np.zeros((6, 6, 4), np.uint8))
    assert isinstance(next(progress), PartRows)
    # The network's own embedding, of any length.
    call = progress.send([7 * embedding_of(engine, query)])
    assert isinstance(call, FunctionCall)
    with pytest.raises(StopIteration) as ended:
        progress.send(call.function())
    output = plan.application.output
    assert isinstance(output, RecordSpec)
    found = search(engine, index, query, 3)
    assert reply_of(plan.application)(output.unpack(ended.value.value)) == {
        "results": [{"file": one.item.file, "similarity": pytest.approx(one.similarity, abs=1e-6)} for one in found]
    }
    # More than there are.
    assert search_chain(tmp_path / "index", part="colours", count=99).outputs["rows"].shape == (13,)


SEARCH = """
from penstock.core.chains.picture_search import search_chain

chain = search_chain({index!r}, part="colours")
"""


def test_the_index_of_a_search_lies_beside_the_declaring_file(
    engine: PackEngine, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder, name in ((home, "beside"), (elsewhere, "here")):
        folder.mkdir()
        index_folder(engine, pictures, folder / name)
    monkeypatch.chdir(elsewhere)
    for index in ("beside", "here", str(home / "beside")):
        file = home / f"search_{Path(index).name}.py"
        file.write_text(SEARCH.format(index=index))
        assert find_chain(str(file)).chain.outputs["rows"].shape == (5,)
    (home / "none.py").write_text(SEARCH.format(index="none"))
    with pytest.raises(ApplicationError, match=r"home/none is no index, nor is .*/elsewhere/none; 'penstock index"):
        find_chain(str(home / "none.py"))
