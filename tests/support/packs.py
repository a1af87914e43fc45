"""Small packs that tests make themselves: graphs of a few operations instead of exported networks."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from penstock.core.bundles.example_arrays import example_arrays
from penstock.core.dim import Dim
from penstock.core.generate import Generate, whole_answer
from penstock.core.packs.pack import BEGIN, GOLDEN, MODEL, STEP, Pack, PackModel, digest, pack_json, read_pack
from penstock.core.packs.pack_live import PackLive, PackState
from penstock.core.pictures.boxes import Boxes
from penstock.core.prepare import RawSpec
from penstock.core.recognition import Recognition
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec

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


# Video codecs add a little red beside green.
SPOTS = Boxes(labels=("car", "person"), frame=(48, 64), least=0.5)


def spots_pack(folder: Path) -> Pack:
    """Write a pack that finds the red of a picture, a car, and the green, a person.

    Boxes are in the pixels of a frame of 48 x 64; scores are the brightest red and green, 0 to 1, from 0.05 on.
    """
    node = helper.make_node
    nodes = [
        node("Cast", ["raw"], ["float"], to=TensorProto.FLOAT),
        node("Slice", ["float", "zero", "two", "last_axis"], ["channels"]),
        node("Greater", ["channels", "bright"], ["is_bright"]),
        node("Cast", ["is_bright"], ["brightness"], to=TensorProto.FLOAT),
        node("ReduceMax", ["brightness"], ["down"], axes=[1], keepdims=0),
        node("ReduceMax", ["brightness"], ["across"], axes=[0], keepdims=0),
        node("ArgMax", ["across"], ["left"], axis=0),
        node("ArgMax", ["down"], ["top"], axis=0),
        node("ArgMax", ["across"], ["last_column"], axis=0, select_last_index=1),
        node("ArgMax", ["down"], ["last_row"], axis=0, select_last_index=1),
        node("Add", ["last_column", "one"], ["right"]),
        node("Add", ["last_row", "one"], ["bottom"]),
        node("Concat", ["left", "top", "right", "bottom"], ["sides"], axis=0),
        node("Transpose", ["sides"], ["whole"], perm=[1, 0]),
        node("Cast", ["whole"], ["in_picture"], to=TensorProto.FLOAT),
        node("Shape", ["raw"], ["shape"], start=0, end=2),
        node("Cast", ["shape"], ["size"], to=TensorProto.FLOAT),
        node("Div", ["size", "frame"], ["shares"]),
        node("ReduceMax", ["shares"], ["share"], keepdims=0),
        node("Div", ["in_picture", "share"], ["in_frame"]),
        node("ReduceMax", ["channels"], ["most"], axes=[0, 1], keepdims=0),
        node("Div", ["most", "white"], ["each"]),
        node("TopK", ["each", "two"], ["sorted", "order"]),
        node("Gather", ["in_frame", "order"], ["places"], axis=0),
        node("Greater", ["sorted", "threshold"], ["counts"]),
        node("Cast", ["counts"], ["ones"], to=TensorProto.INT64),
        node("ReduceSum", ["ones", "zero"], ["objects"], keepdims=1),
        *(node("Unsqueeze", [a, "zero"], [b]) for a, b in (("places", "boxes"), ("order", "classes"))),
        node("Unsqueeze", ["sorted", "zero"], ["scores"]),
    ]
    constants = {
        "zero": np.array([0]),
        "one": np.array([[1]]),
        "two": np.array([2]),
        "last_axis": np.array([2]),
        "bright": np.array(128, np.float32),
        "white": np.array(255, np.float32),
        "threshold": np.array(0.05, np.float32),
        "frame": np.array(SPOTS.frame, np.float32),
    }
    objects = Dim("objects", max=2, min=0)
    outputs = (
        TensorSpec(name="boxes", dtype="float32", shape=(objects, 4), meaning="boxes", units="pixels of the frame"),
        TensorSpec(name="classes", dtype="int64", shape=(objects,), meaning="their classes"),
        TensorSpec(name="scores", dtype="float32", shape=(objects,), meaning="their scores"),
    )
    model = _model(
        nodes,
        constants,
        {"raw": ("uint8", ["H", "W", 4])},
        {
            "boxes": ("float32", [1, 2, 4]),
            "classes": ("int64", [1, 2]),
            "scores": ("float32", [1, 2]),
            "objects": ("int64", [1]),
        },
    )
    red = plain((0, 0, 0), 96, 128)
    red[10:30, 40:80, 0] = 255
    answers = [
        {"boxes": np.array([[20, 5, 40, 15]]), "classes": np.array([0]), "scores": np.array([1])},
        {"boxes": np.zeros((0, 4)), "classes": np.zeros(0), "scores": np.zeros(0)},
    ]
    typed = [{spec.name: answer[spec.name].astype(spec.dtype) for spec in outputs} for answer in answers]
    golden = {"raw.0": red, "raw.1": plain((0, 0, 0))}
    return _written(
        folder,
        model,
        golden | example_arrays("outputs", RecordSpec(outputs), RecordSpec(outputs).of_many(typed)),
        name="spots",
        kind="oneshot",
        raw=RGBA,
        outputs=outputs,
        answers=3,
        shows=SPOTS,
        golden_count=2,
        recognition=None,
        live=None,
    )


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
        _words_graph(),
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


def _words_graph() -> bytes:
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
    return _model(
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


def words_answer(words: list[int], weights: list[float]) -> dict[str, Array]:
    """Expected outputs of the graph of `words_pack`."""
    known = np.array(words) != 0
    numbers = np.array(weights, np.float32)
    return {
        "sums": np.array([numbers.sum(), numbers[known].sum()], np.float32),
        "raised": numbers + 1,
        "known": np.array(words)[known],
    }


def sums_pack(folder: Path) -> Pack:
    """Write a pack whose answers take steps: each token is a sum of all digits and of all tokens before, modulo 10.

    A token of 0 ends the answer, and so do `max_steps` and a full cache of 20 tokens.
    """
    digits = TensorSpec(
        name="digits", dtype="int64", shape=(Dim("length", max=40),), meaning="digits of a number", limits=(0, 9)
    )
    inputs = (
        digits,
        TensorSpec(name="first", dtype="int64", shape=(), meaning="added to the first token", default=0),
        TensorSpec(name="most", dtype="int64", shape=(), meaning="the most tokens", limits=(1, 30), default=30),
    )
    outputs = (
        TensorSpec(name="token", dtype="int64", shape=(), meaning="a digit; 0 is the end"),
        TensorSpec(name="sums", dtype="float32", shape=(2,), meaning="halves of the sums of digits and tokens"),
    )
    generate = Generate(
        state={
            "memory": TensorSpec(dtype="int64", shape=digits.shape, meaning="the digits"),
            "cache": TensorSpec(dtype="int64", shape=(1, Dim("past", max=20)), meaning="the tokens"),
            "last": TensorSpec(dtype="int64", shape=(), meaning="the token before"),
        },
        max_steps=30,
        max_steps_input="most",
    )
    examples = [([3, 1, 4], 0, 30), ([9], 2, 5), (list(range(10)) * 4, 7, 30)]
    records = RecordSpec(inputs).of_many(
        [
            {"digits": np.array(given), "first": np.array(first), "most": np.array(most)}
            for given, first, most in examples
        ]
    )
    whole = whole_answer(outputs, generate.max_steps)
    answers = whole.of_many([sums_answer(*example)[0] for example in examples])
    golden = example_arrays("inputs", RecordSpec(inputs), records) | example_arrays("outputs", whole, answers)
    return _written(
        folder,
        _sums_begin(),
        golden,
        step=_sums_step(),
        name="sums",
        kind="generate",
        inputs=inputs,
        outputs=outputs,
        answers=2,
        golden_count=3,
        recognition=None,
        live=None,
        generate=generate,
    )


def _sums_begin() -> bytes:
    nodes = [
        helper.make_node("Identity", ["digits"], ["next.memory"]),
        helper.make_node("Identity", ["first"], ["next.last"]),
        helper.make_node("Identity", ["none"], ["next.cache"]),
        helper.make_node("Identity", ["zero"], ["next.past"]),
    ]
    state = {"cache": ("int64", [1, 1, 0]), "last": ("int64", [1]), "past": ("int64", [1])}
    return _model(
        nodes,
        {"none": np.zeros((1, 1, 0), np.int64), "zero": np.array([0])},
        {
            "digits": ("int64", [1, "length"]),
            "length": ("int64", [1]),
            "first": ("int64", [1]),
            "most": ("int64", [1]),
        },
        {f"next.{name}": each for name, each in {"memory": ("int64", [1, "length"]), **state}.items()},
    )


def _sums_step() -> bytes:
    nodes = [
        helper.make_node("Shape", ["state.cache"], ["room"], start=2),
        helper.make_node("Squeeze", ["room"], ["room_0"]),
        helper.make_node("Range", ["none", "room_0", "one"], ["at"]),
        helper.make_node("Less", ["at", "state.past"], ["is_old"]),
        helper.make_node("Equal", ["at", "state.past"], ["is_new"]),
        helper.make_node("Where", ["is_old", "state.cache", "none"], ["tokens"]),
        helper.make_node("ReduceSum", ["tokens", "axes"], ["of_tokens"], keepdims=0),
        helper.make_node("Shape", ["state.memory"], ["width"], start=1),
        helper.make_node("Squeeze", ["width"], ["width_0"]),
        helper.make_node("Range", ["none", "width_0", "one"], ["place"]),
        helper.make_node("Less", ["place", "state.length"], ["is_digit"]),
        helper.make_node("Where", ["is_digit", "state.memory", "none"], ["digits"]),
        helper.make_node("ReduceSum", ["digits", "axis"], ["of_digits"], keepdims=0),
        helper.make_node("Add", ["of_digits", "of_tokens"], ["both"]),
        helper.make_node("Add", ["both", "state.last"], ["more"]),
        helper.make_node("Add", ["more", "one"], ["all"]),
        helper.make_node("Mod", ["all", "ten"], ["token"]),
        helper.make_node("Equal", ["token", "none"], ["step.done"]),
        helper.make_node("Where", ["is_new", "token", "state.cache"], ["next.cache"]),
        helper.make_node("Add", ["state.past", "one"], ["next.past"]),
        helper.make_node("Identity", ["token"], ["next.last"]),
        helper.make_node("Unsqueeze", ["of_digits", "axis"], ["digits_1"]),
        helper.make_node("Unsqueeze", ["of_tokens", "axis"], ["tokens_1"]),
        helper.make_node("Concat", ["digits_1", "tokens_1"], ["whole"], axis=1),
        helper.make_node("Cast", ["whole"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "half"], ["sums"]),
    ]
    constants = {
        "none": np.array(0),
        "one": np.array(1),
        "ten": np.array(10),
        "half": np.array(0.5, np.float32),
        "axis": np.array([1]),
        "axes": np.array([1, 2]),
    }
    cache, number = ("int64", [1, 1, "past"]), ("int64", [1])
    return _model(
        nodes,
        constants,
        {
            "state.memory": ("int64", [1, "length"]),
            "state.cache": cache,
            **{f"state.{name}": number for name in ("last", "past", "length")},
        },
        {
            "token": number,
            "sums": ("float32", [1, 2]),
            "step.done": ("bool", [1]),
            # The memory stays as it is.
            "next.cache": cache,
            "next.last": number,
            "next.past": number,
        },
    )


def sums_answer(digits: list[int], first: int = 0, most: int = 30) -> tuple[dict[str, Array], str]:
    """Expected outputs of `sums_pack`, and the reason why the answer ends."""
    tokens, sums, last = list[int](), list[list[float]](), first
    while True:
        sums.append([sum(digits) / 2, sum(tokens) / 2])
        last = (sum(digits) + sum(tokens) + last + 1) % 10
        tokens.append(last)
        if last == 0 or len(tokens) == min(most, 20):
            answer = {"token": np.array(tokens), "sums": np.array(sums, np.float32)}
            return answer, "max_steps" if last else "end"


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


def _written(folder: Path, model: bytes, golden: dict[str, Array], step: bytes | None = None, **fields: Any) -> Pack:
    folder.mkdir(parents=True, exist_ok=True)
    graphs = {MODEL: model} if step is None else {BEGIN: model, STEP: step}
    for name, data in graphs.items():
        (folder / name).write_bytes(data)
    save_file(golden, folder / GOLDEN)
    file, *others = graphs
    fields = {"golden_count": len(golden["outputs"])} | fields if "outputs" in golden else fields
    pack = Pack(
        folder=folder,
        description="made by a test",
        licence="",
        made={"penstock": "0", "when": "2026-01-01T00:00:00+00:00"},
        tolerance=1e-5,
        models={"fp32": PackModel(file=file, agreement=1.0, ms=1.0, step=next(iter(others), None))},
        files={name: digest((folder / name).read_bytes()) for name in (*graphs, GOLDEN)},
        **fields,
    )
    (folder / "pack.json").write_bytes(pack_json(pack))
    return read_pack(folder)


def flowers_pack(folder: Path, *, units: str = "") -> Pack:
    """A pack of four named columns, with the scores of three labels; the second is the sum of the last two columns."""
    weights = np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0]], np.float32)
    columns = ("sepal_length", "sepal_width", "petal_length", "petal_width")
    inputs = (TensorSpec(name="sizes", dtype="float32", shape=(4,), meaning="sizes", units="cm", labels=columns),)
    labels = ("setosa", "versicolor", "virginica")
    outputs = (
        TensorSpec(name="kinds", dtype="float32", shape=(3,), meaning="score of each", units=units, labels=labels),
    )
    given = np.array([[5, 3, 1, 0.5], [6, 3, 4, 1.5]], np.float32)
    return _written(
        folder,
        _model(
            [helper.make_node("MatMul", ["sizes", "weights"], ["kinds"])],
            {"weights": weights},
            {"sizes": ("float32", [1, 4])},
            {"kinds": ("float32", [1, 3])},
        ),
        {"inputs": given, "outputs": given @ weights},
        name="flowers",
        kind="oneshot",
        inputs=inputs,
        outputs=outputs,
        answers=1,
        recognition=None,
        live=None,
    )


def motion_pack(folder: Path, *, labels: bool) -> Pack:
    """A live pack of frames of two numbers at 10 Hz, in chunks of four: sum and difference of each frame.

    Its state is the number of the frames so far, which it does not use.
    """
    inputs = (TensorSpec(name="motion", dtype="float32", shape=(4, 2), meaning="acceleration", units="g"),)
    names, units = (("up", "down"), "score") if labels else ((), "g")
    outputs = (TensorSpec(name="moves", dtype="float32", shape=(4, 2), meaning="moves", units=units, labels=names),)
    weights = np.array([[1, 1], [1, -1]], np.float32)
    nodes = [
        helper.make_node("MatMul", ["motion", "weights"], ["moves"]),
        helper.make_node("Identity", ["length"], ["moves.length"]),
        helper.make_node("Add", ["length", "count"], ["next.count"]),
        helper.make_node("Identity", ["last"], ["unused"]),
    ]
    whole = np.array([[[1, 2], [3, 4], [5, 7], [1, 1], [0, 2]]], np.float32)
    state = PackState(input="count", output="next.count", dtype="int64", shape=(1,))
    live = PackLive(rate_hz=10, chunk=4, states=(state,), length="length", last="last", output_length="moves.length")
    return _written(
        folder,
        _model(
            nodes,
            {"weights": weights},
            {
                "motion": ("float32", [1, 4, 2]),
                "length": ("int64", [1]),
                "last": ("bool", [1]),
                "count": ("int64", [1]),
            },
            {
                "moves": ("float32", [1, 4, 2]),
                "moves.length": ("int64", [1]),
                "next.count": ("int64", [1]),
                "unused": ("bool", [1]),
            },
        ),
        {"inputs": whole, "outputs": whole @ weights},
        name="motion",
        kind="live",
        inputs=inputs,
        outputs=outputs,
        answers=1,
        recognition=None,
        live=live,
    )
