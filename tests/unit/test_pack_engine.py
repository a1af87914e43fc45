"""Packs run by ONNX Runtime."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.pack import chunks_of, read_pack
from penstock.device.pack_engine import LivePackEngine, PackEngine
from tests.support.packs import CHUNK, colour_answer, colour_pack, loud_pack, plain


def test_answers_and_embedding_of_pictures_of_any_size(tmp_path: Path) -> None:
    engine = PackEngine(colour_pack(tmp_path / "pack"))
    for pixels in (plain((200, 3, 4)), plain((9, 120, 4), 3, 5), plain((9, 8, 77), 200, 1)):
        probabilities, embedding = engine.run(pixels)
        for got, wanted in zip((probabilities, embedding), colour_answer(pixels), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (plain((1, 2, 3)).astype(np.float32), "raw is float32.24, 32, 4."),
        (plain((1, 2, 3))[:, :, :3], "raw is uint8.24, 32, 3."),
        (np.zeros((0, 3, 4), np.uint8), "raw is uint8.0, 3, 4."),
    ],
)
def test_another_input_is_refused_in_a_sentence(tmp_path: Path, pixels: np.ndarray, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        PackEngine(colour_pack(tmp_path / "pack")).run(pixels)


def test_a_pack_that_answers_otherwise_here_is_refused(tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
    object.__setattr__(pack, "tolerance", 1e-12)
    with pytest.raises(PackCorrupt, match=r"differs on its example 1 from the recorded answer by .* 1e-12"):
        PackEngine(pack)


def test_a_flipped_byte_of_the_model_is_found(tmp_path: Path) -> None:
    model = colour_pack(tmp_path / "pack").model()
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    with pytest.raises(PackCorrupt, match=r"model\.onnx is not the file that was written"):
        read_pack(tmp_path / "pack")


def test_what_is_no_graph_is_refused_in_a_sentence(tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
    pack.model().write_bytes(b"nothing")
    with pytest.raises(PackError, match=r"ONNX Runtime .* cannot run .*model.onnx"):
        PackEngine(pack)


@pytest.mark.parametrize("change", [{"input_name": "other"}, {"outputs": 0}])
def test_a_graph_of_another_description_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    pack = colour_pack(tmp_path / "pack")
    if "outputs" in change:
        change = {"outputs": tuple(replace(output, name=f"my_{output.name}") for output in pack.outputs)}
    with pytest.raises(PackCorrupt, match=r"the graph of the pack .* is not what pack\.json says \(.*\); export"):
        PackEngine(replace(pack, **change))


def test_live_and_one_shot_packs_are_not_mistaken(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="'loud' takes live signals"):
        PackEngine(loud_pack(tmp_path / "loud"))
    with pytest.raises(PackError, match="'colours' takes no live signal"):
        LivePackEngine(colour_pack(tmp_path / "colours"))


def test_a_stream_carries_its_state_from_chunk_to_chunk(tmp_path: Path) -> None:
    engine = LivePackEngine(loud_pack(tmp_path / "pack"))
    begun = engine.begin()
    first_U, first = engine.step(np.full(CHUNK, 3000, np.int16), begun)
    second_U, second = engine.step(np.zeros(CHUNK // 2, np.int16), first, last=True)
    assert [float(states["state_0"][0, 0]) for states in (begun, first, second)] == [7, 8, 9]
    assert (first_U[:, 1].tolist(), second_U[:, 1].tolist()) == ([2000, 2000], [-1000])


def test_a_chunk_that_is_too_long_is_refused(tmp_path: Path) -> None:
    engine = LivePackEngine(loud_pack(tmp_path / "pack"))
    with pytest.raises(InvalidInput, match=r"a chunk is int16.1601.; 'loud' takes int16.1600. or less"):
        engine.step(np.zeros(CHUNK + 1, np.int16), engine.begin())


@pytest.mark.parametrize(("frames", "lengths"), [(0, [0]), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_the_chunks_of_a_signal(frames: int, lengths: list[int]) -> None:
    chunks = list(chunks_of(np.arange(frames), 4))
    assert [len(chunk) for chunk, _ in chunks] == lengths
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]
