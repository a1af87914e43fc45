"""Packs run by ONNX Runtime."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.packs.pack import GOLDEN, read_pack
from penstock.core.packs.pack_live import chunks_of
from penstock.device.pack_engine import LivePackEngine, PackEngine
from penstock.device.watch import WatchRun
from tests.support.packs import CHUNK, colour_answer, colour_pack, loud_pack, plain, words_answer, words_pack


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


def test_a_graph_of_another_description_is_refused(tmp_path: Path) -> None:
    pack = colour_pack(tmp_path / "pack")
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


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PackEngine:
    return PackEngine(words_pack(tmp_path_factory.mktemp("words")))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-100, 100, width=32)), min_size=1, max_size=5),
    st.booleans(),
)
def test_named_tensors_of_any_length_are_cut_to_it(
    words: PackEngine, each: list[tuple[int, float]], as_arrays: bool
) -> None:
    inputs: dict[str, Any] = {"words": [word for word, _ in each], "weights": [weight for _, weight in each]}
    expected = words_answer(**inputs)
    # Arrays of another dtype are converted where no number changes.
    found = words.predict({name: np.array(numbers) for name, numbers in inputs.items()} if as_arrays else inputs)
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in expected.items()
    }
    for name, array in expected.items():
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], array, atol=1e-3)


WRONG = [
    ({"words": [1]}, "The input 'weights' is missing; send 'words', 'weights'."),
    ({"words": [1], "weights": [1], "more": 1}, "There is no input 'more'; there is 'words', 'weights'."),
    ([1], "The input is a list; it must have 'words', 'weights' by name."),
    ({"words": [1, 2], "weights": [1]}, "weights has 1 tokens and words has 2; send both equally long."),
    ({"words": [], "weights": []}, "words has 0 tokens; it must have from 1 to 5."),
    ({"words": [1] * 6, "weights": [1] * 6}, "words has 6 tokens; it must have from 1 to 5."),
    ({"words": [10], "weights": [1]}, "words holds 10; it must be from 0 to 9."),
    ({"words": [[1]], "weights": [1]}, "words has 2 dimensions, [1, 1]; it must be int64[tokens<=5]."),
    ({"words": 1, "weights": [1]}, "words has 0 dimensions, []; it must be int64[tokens<=5]."),
    ({"words": [1.5], "weights": [1]}, "words holds 1.5; it must be a whole number from 0 to 9."),
    (
        {"words": [1], "weights": [1e39]},
        "weights holds 1.000e+39; it must be a finite number up to 3.4e+38.",
    ),
    ({"words": ["a"], "weights": [1]}, "words holds a string, not only numbers; it must be int64[1]."),
    ({"words": [True], "weights": [1]}, "words holds a bool, not only numbers; it must be int64[1]."),
    (
        {"words": [1, [2]], "weights": [1, 2]},
        "words has a list of 1 where a number belongs; it must be nested lists of shape [2].",
    ),
]


@pytest.mark.parametrize(("inputs", "sentence"), WRONG)
def test_named_tensors_that_do_not_fit_are_refused_as_by_a_server(
    words: PackEngine, inputs: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        words.predict(inputs)
    assert str(refused.value) == sentence


def test_a_single_tensor_can_be_given_by_name(tmp_path: Path) -> None:
    engine = PackEngine(colour_pack(tmp_path / "pack"))
    pixels = plain((200, 3, 4))
    found = engine.predict({"raw": pixels})
    assert list(found) == ["probabilities", "embedding"]
    np.testing.assert_array_equal(found["probabilities"], engine.run(pixels)[0])
    with pytest.raises(InvalidInput, match="There is no input 'pixels'; there is 'raw'"):
        engine.predict({"pixels": pixels})
    with pytest.raises(InvalidInput, match="raw is a list; it must be an array"):
        engine.predict({"raw": pixels.tolist()})


def test_several_tensors_have_no_order(words: PackEngine) -> None:
    with pytest.raises(
        InvalidInput, match=r"takes words: int64\[tokens<=5\], weights: .*; give them to predict\(\) by"
    ):
        words.run(np.zeros(3, np.int64))


@pytest.mark.parametrize("change", ["found", "sums"])
def test_a_recorded_answer_of_another_length_or_value_is_found(tmp_path: Path, change: str) -> None:
    pack = words_pack(tmp_path / "pack")
    arrays = load_file(pack.folder / GOLDEN)
    arrays[f"outputs.{change}"] = arrays[f"outputs.{change}"].copy()
    arrays[f"outputs.{change}"][1] += 1
    save_file(arrays, pack.folder / GOLDEN)
    with pytest.raises(PackCorrupt, match="differs on its example 1 from the recorded answer"):
        PackEngine(pack)


def test_watch_refuses_what_is_neither_picture_nor_sound(words: PackEngine) -> None:
    source: Any = None
    with pytest.raises(
        PackError, match=r"takes words: .*, not pictures of any size; name a \.csv, \.npy or \.npz file"
    ):
        WatchRun(words, source)
