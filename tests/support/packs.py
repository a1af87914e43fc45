"""Small packs that tests make themselves: graphs of a few operations instead of exported networks."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from penstock.core.example_arrays import example_arrays
from penstock.core.pack import GOLDEN, MODEL, Pack, PackLive, PackModel, PackState, digest, pack_json, read_pack
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, Dim, TensorSpec

COLOURS = ("red", "green", "blue")
RGBA = RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture", max_shape=(4096, 4096, 4))
OPSET = 17
RATE_HZ, CHUNK = 16_000, 1_600


def plain(colour: tuple[int, int, int], height: int = 24, width: int = 32) -> Array:
    """A picture of one colour, RGBA."""
    return np.broadcast_to(np.array([*colour, 255], np.uint8), (height, width, 4)).copy()


def colour_answer(pixels: Array) -> tuple[Array, Array]:
    """Expected probabilities and embedding of the graph of `colour_pack`."""
    mean = pixels[:, :, :3].astype(np.float32).mean((0, 1)) / 255
    raised = np.exp(10 * mean - (10 * mean).max())
    return raised / raised.sum(), mean


def colour_pack(
    folder: Path, *, recognition: Recognition | None = None, embedding: bool = True, rounds: int = 0
) -> Pack:
    """Write a pack that classifies a picture as red, green or blue.

    Args:
        folder: Where it goes.
        recognition: Instead of the usual constants.
        embedding: Whether the mean colour is an output too.
        rounds: Products of large matrices beside it, to make it slow.
    """
    nodes = [
        helper.make_node("Cast", ["raw"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float"], ["mean4"], axes=[0, 1], keepdims=0),
        helper.make_node("Slice", ["mean4", "zero", "three"], ["mean3"]),
        helper.make_node("Div", ["mean3", "white"], ["mean"]),
        helper.make_node("Mul", ["mean", "ten"], ["logits"]),
        *_slow(rounds),
        helper.make_node("Softmax", ["logits_late" if rounds else "logits"], ["soft"], axis=0),
        helper.make_node("Unsqueeze", ["soft", "zero"], ["probabilities"]),
        helper.make_node("Unsqueeze", ["mean", "zero"], ["embedding"]),
    ]
    constants = {
        "zero": np.array([0]),
        "three": np.array([3]),
        "white": np.array(255, np.float32),
        "ten": np.array(10, np.float32),
        **({"large": np.full((512, 512), 1 / 512, np.float32), "nothing": np.array(0, np.float32)} if rounds else {}),
    }
    outputs = [
        TensorSpec(
            name="probabilities",
            dtype="float32",
            shape=(3,),
            meaning="of a colour",
            units="probability",
            labels=COLOURS,
        ),
        TensorSpec(name="embedding", dtype="float32", shape=(3,), meaning="the mean colour"),
    ][: 2 if embedding else 1]
    examples = [plain((200, 10, 10)), plain((10, 200, 60), 7, 5), plain((0, 90, 210), 40, 3)]
    golden = {f"raw.{number}": example for number, example in enumerate(examples)}
    golden["outputs"] = np.stack([colour_answer(example)[0] for example in examples])
    return _written(
        folder,
        _model(nodes, constants, {"raw": ("uint8", ["H", "W", 4])}, {o.name: ("float32", [1, 3]) for o in outputs}),
        golden,
        name="colours",
        kind="oneshot",
        raw=RGBA,
        outputs=tuple(outputs),
        recognition=recognition or Recognition(labels=COLOURS),
        live=None,
    )


def _slow(rounds: int) -> list[Any]:
    if not rounds:
        return []
    # It begins with the picture and ends in the answer, or ONNX Runtime would leave it out.
    more = [helper.make_node("MatMul", [f"m{i}", "large"], [f"m{i + 1}"]) for i in range(rounds)]
    return [
        helper.make_node("ReduceMax", ["mean"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "large"], ["m0"]),
        *more,
        helper.make_node("ReduceMax", [f"m{rounds}"], ["largest"], keepdims=0),
        helper.make_node("Mul", ["largest", "nothing"], ["none"]),
        helper.make_node("Add", ["logits", "none"], ["logits_late"]),
    ]


def loud_pack(folder: Path) -> Pack:
    """Write a live pack that classifies each 50 ms of sound as loud or not, and counts chunks in its state."""
    nodes = [
        helper.make_node("Cast", ["sound"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Abs", ["float"], ["abs"]),
        helper.make_node("Reshape", ["abs", "halves"], ["windows"]),
        helper.make_node("ReduceMean", ["windows"], ["mean"], axes=[2], keepdims=1),
        helper.make_node("Sub", ["mean", "threshold"], ["over"]),
        helper.make_node("Neg", ["over"], ["under"]),
        helper.make_node("Concat", ["under", "over"], ["levels"], axis=2),
        helper.make_node("Div", ["length", "window"], ["frames"]),
        helper.make_node("Add", ["state_0", "one"], ["next_0"]),
        helper.make_node("Not", ["last"], ["goes_on"]),
    ]
    constants = {
        "halves": np.array([1, 2, CHUNK // 2]),
        "threshold": np.array(1000, np.float32),
        "window": np.array([CHUNK // 2]),
        "one": np.array(1, np.float32),
    }
    model = _model(
        nodes,
        constants,
        {
            "sound": ("int16", [1, CHUNK]),
            "length": ("int64", [1]),
            "last": ("bool", [1]),
            "state_0": ("float32", [1, 1]),
        },
        {"levels": ("float32", [1, 2, 2]), "frames": ("int64", [1]), "next_0": ("float32", [1, 1])},
    )
    signal = np.concatenate([np.zeros(CHUNK, np.int16), np.full(CHUNK, 5000, np.int16)])
    levels = np.array([[1000, -1000]] * 2 + [[-4000, 4000]] * 2, np.float32)
    state = PackState(input="state_0", output="next_0", dtype="float32", shape=(1, 1), initial=7)
    return _written(
        folder,
        model,
        {"inputs": signal[None], "outputs": levels[None]},
        name="loud",
        kind="live",
        inputs=(TensorSpec(name="sound", dtype="int16", shape=(CHUNK,), meaning="100 ms of sound"),),
        outputs=(TensorSpec(name="levels", dtype="float32", shape=(2, 2), meaning="how loud", labels=("-", "loud")),),
        recognition=None,
        live=PackLive(
            rate_hz=RATE_HZ, chunk=CHUNK, states=(state,), length="length", last="last", output_length="frames"
        ),
    )


def words_pack(folder: Path) -> Pack:
    """Write a pack of two inputs of varying length and three outputs, one of a length that no input has.

    `sums` is of all weights, and of those of known words; `raised` is one more than each weight, in the padding too;
    `known` are the known words' numbers, first in a room of five.
    """
    nodes = [
        helper.make_node("Equal", ["words", "unknown"], ["is_unknown"]),
        helper.make_node("Not", ["is_unknown"], ["is_known"]),
        helper.make_node("Cast", ["is_known"], ["ones"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["weights", "ones"], ["of_known"]),
        helper.make_node("ReduceSum", ["weights", "axis"], ["total"]),
        helper.make_node("ReduceSum", ["of_known", "axis"], ["total_known"]),
        helper.make_node("Concat", ["total", "total_known"], ["sums"], axis=1),
        helper.make_node("Add", ["weights", "one"], ["raised"]),
        helper.make_node("Reshape", ["is_known", "flat"], ["is_known_flat"]),
        helper.make_node("Compress", ["words", "is_known_flat"], ["some"], axis=1),
        helper.make_node("Concat", ["some", "room"], ["more"], axis=1),
        helper.make_node("Slice", ["more", "zero", "five", "axis"], ["known"]),
        helper.make_node("ReduceSum", ["ones", "axis"], ["count_float"], keepdims=0),
        helper.make_node("Cast", ["count_float"], ["found"], to=TensorProto.INT64),
    ]
    constants = {
        "unknown": np.array(0),
        "axis": np.array([1]),
        "one": np.array(1, np.float32),
        "flat": np.array([-1]),
        "room": np.full((1, 5), 7),
        "zero": np.array([0]),
        "five": np.array([5]),
    }
    model = _model(
        nodes,
        constants,
        {"words": ("int64", [1, "tokens"]), "weights": ("float32", [1, "tokens"]), "tokens": ("int64", [1])},
        {
            "sums": ("float32", [1, 2]),
            "raised": ("float32", [1, "tokens"]),
            "known": ("int64", [1, 5]),
            "found": ("int64", [1]),
        },
    )
    tokens, found = Dim("tokens", max=5), Dim("found", max=5, min=0)
    inputs = (
        TensorSpec(name="words", dtype="int64", shape=(tokens,), meaning="numbers of words", limits=(0, 9)),
        TensorSpec(name="weights", dtype="float32", shape=(tokens,), meaning="weight of each"),
    )
    outputs = (
        TensorSpec(name="sums", dtype="float32", shape=(2,), meaning="sums", labels=("all", "known")),
        TensorSpec(name="raised", dtype="float32", shape=(tokens,), meaning="weights and one"),
        TensorSpec(name="known", dtype="int64", shape=(found,), meaning="known words"),
    )
    texts = [[3, 0, 4], [0], [1, 2, 3, 4, 5]]
    given = RecordSpec(inputs).of_many(
        [{"words": np.array(text), "weights": np.arange(len(text)) / 2} for text in texts]
    )
    made = RecordSpec(outputs).of_many([words_answer(text, [at / 2 for at in range(len(text))]) for text in texts])
    golden = example_arrays("inputs", RecordSpec(inputs), given) | example_arrays("outputs", RecordSpec(outputs), made)
    return _written(
        folder,
        model,
        golden,
        name="words",
        kind="oneshot",
        inputs=inputs,
        outputs=outputs,
        answers=3,
        golden_count=3,
        recognition=None,
        live=None,
    )


def words_answer(words: list[int], weights: list[float]) -> dict[str, Array]:
    """Expected outputs of the graph of `words_pack`."""
    known = np.array(words) != 0
    numbers = np.array(weights, np.float32)
    return {
        "sums": np.array([numbers.sum(), numbers[known].sum()], np.float32),
        "raised": numbers + 1,
        "known": np.array(words)[known],
    }


def _model(
    nodes: list[Any],
    constants: dict[str, Array],
    inputs: dict[str, tuple[str, list[Any]]],
    outputs: dict[str, tuple[str, list[Any]]],
) -> bytes:
    def info(name: str, described: tuple[str, list[Any]]) -> Any:
        dtype, shape = described
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    graph = helper.make_graph(
        nodes,
        "small",
        [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _written(folder: Path, model: bytes, golden: dict[str, Array], **fields: Any) -> Pack:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL).write_bytes(model)
    save_file(golden, folder / GOLDEN)
    fields = {"golden_count": len(golden["outputs"])} | fields if "outputs" in golden else fields
    pack = Pack(
        folder=folder,
        description="made by a test",
        licence="",
        made={"penstock": "0"},
        tolerance=1e-5,
        models={"fp32": PackModel(file=MODEL, agreement=1.0, ms=1.0)},
        files={name: digest((folder / name).read_bytes()) for name in (MODEL, GOLDEN)},
        **fields,
    )
    (folder / "pack.json").write_bytes(pack_json(pack))
    return read_pack(folder)
