"""Packs that are made in milliseconds, and test pictures and sounds, for the offline app."""

import base64
import hashlib
import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper, numpy_helper

from penstock.core.spec import Array

WEB = Path(__file__).parents[2] / "penstock" / "device" / "web"

# What the pack knows: the colour of a picture's left half.
COLOURS = {"red": (200, 40, 40), "orange": (220, 140, 30), "green": (40, 160, 60), "blue": (40, 60, 200)}
LABELS = tuple(COLOURS)
GROUPS = ("warm", "warm", "cool", "cool")
# The right half tells a frame's number, as a grey that no camera's rounding can confuse with another.
IDS = 16
GREY_FIRST, GREY_STEP = 40, 12
OPSET = 17


def write_pack(folder: Path, *, name: str = "colours", slow: int = 0, half_life_s: float = 0.05, **more: Any) -> Path:
    """A pack whose network knows four colours and whose embedding is the mean colour of the right half, 0 to 1.

    Args:
        folder: Where it is written; what is there goes.
        name: What `pack.json` calls it.
        slow: How many products of 512 x 512 matrices the network takes its time with.
        half_life_s: Of the smoothing.
        more: Other fields of `pack.json`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WEB, folder / "web")
    onnx.save(colour_network(slow), folder / "model.onnx")
    probabilities = {"name": "probabilities", "dtype": "float32", "shape": [len(LABELS)], "labels": LABELS}
    embedding = {"name": "embedding", "dtype": "float32", "shape": [3], "labels": None}
    recognition = {"labels": LABELS, "groups": GROUPS, "unsure_below": 0.5, "half_life_s": half_life_s}
    pack = {
        "kind": "oneshot",
        "inputs": [{"name": "pixels", "dtype": "uint8", "shape": [None, None, 4], "max_shape": [4096, 4096, 4]}],
        "outputs": [output | {"meaning": "", "units": ""} for output in (probabilities, embedding)],
        "recognition": recognition | {"enter": 0.6, "leave": 0.4},
        "live": None,
    }
    return finish_pack(folder, {"name": name, "description": "Knows four colours.", **pack, **more})


def finish_pack(folder: Path, fields: dict[str, Any]) -> Path:
    """Write `pack.json` with the hashes of the files in the folder."""
    (folder / "pack.json").unlink(missing_ok=True)
    (folder / "pack.sig").unlink(missing_ok=True)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "index" not in path.parts]
    about = {path.relative_to(folder).as_posix(): _about(path) for path in files}
    always = {
        "schema_version": 2,
        "licence": "CC0-1.0",
        "made": {"when": "2026-01-01T00:00:00Z"},
        "golden": {"tolerance": 1e-5, "count": 0},
        "models": {"fp32": {"file": "model.onnx"}},
        "files": about,
    }
    unsealed = json.dumps(always | fields | {"sha256": "0" * 64}, sort_keys=True)
    (folder / "pack.json").write_text(unsealed.replace("0" * 64, hashlib.sha256(unsealed.encode()).hexdigest()))
    return folder


def _about(file: Path) -> dict[str, Any]:
    return {"sha256": sha256_of(file), "bytes": file.stat().st_size}


def sha256_of(file: Path) -> str:
    """Hash the content, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def version_of(folder: Path) -> str:
    """Return the name of the version of a pack in the app."""
    return sha256_of(folder / "pack.json")


def sign(folder: Path, key: Ed25519PrivateKey) -> None:
    """Write `pack.sig`."""
    signature = {
        "algorithm": "Ed25519",
        "public_key": base64.b64encode(key.public_key().public_bytes_raw()).decode(),
        "signature": base64.b64encode(key.sign((folder / "pack.json").read_bytes())).decode(),
    }
    (folder / "pack.sig").write_text(json.dumps(signature))


def colour_network(slow: int) -> onnx.ModelProto:
    """`pixels` uint8 `[H, W, 4]` in; `probabilities` `[1, 4]` and `embedding` `[1, 3]` out."""
    palette_LC = np.array(list(COLOURS.values()), np.float32)
    constants: dict[str, Array] = {
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "three": np.array([3], np.int64),
        "far": np.array([1 << 30], np.int64),
        "scale": np.array(255, np.float32),
        "weights": palette_LC.T / 400,
        "bias": -(palette_LC**2).sum(1) / 800,
        "nothing": np.array(0, np.float32),
        "square": np.array([512, 512], np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Shape", ["pixels"], ["shape"]),
        node("Gather", ["shape", "one"], ["width"]),
        node("Div", ["width", "two"], ["half"]),
        node("Cast", ["pixels"], ["numbers"], to=TensorProto.FLOAT),
        node("Slice", ["numbers", "zero", "three", "two"], ["rgb"]),
        node("Slice", ["rgb", "zero", "half", "one"], ["left"]),
        node("Slice", ["rgb", "half", "far", "one"], ["right"]),
        node("ReduceMean", ["left"], ["colour"], axes=[0, 1], keepdims=0),
        node("ReduceMean", ["right"], ["grey"], axes=[0, 1], keepdims=0),
        node("Div", ["grey", "scale"], ["embedding_C"]),
        node("Unsqueeze", ["embedding_C", "zero"], ["embedding"]),
        *_slowness(slow),
        node("Add", ["colour", "lateness"], ["late_colour"]),
        node("MatMul", ["late_colour", "weights"], ["product"]),
        node("Add", ["product", "bias"], ["logits_L"]),
        node("Unsqueeze", ["logits_L", "zero"], ["logits"]),
        node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["H", "W", 4])],
        [
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [1, len(LABELS)]),
            helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [1, 3]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return _model(graph)


def write_small_pack(folder: Path) -> Path:
    """A pack that takes grey pictures of 8 x 8 alone and knows where they are bright: left or right."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WEB, folder / "web")
    sides = np.repeat(np.eye(2, dtype=np.float32), 4, 0)[None].repeat(8, 0).reshape(64, 2) / 2000
    node, value = helper.make_node, helper.make_tensor_value_info
    nodes = [
        node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        node("Reshape", ["numbers", "flat"], ["row"]),
        node("MatMul", ["row", "sides"], ["logits"]),
        node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    constants = {"sides": sides, "flat": np.array([1, 64], np.int64)}
    graph = helper.make_graph(
        nodes,
        "sides",
        [value("image", TensorProto.UINT8, [1, 8, 8])],
        [value("probabilities", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(constant, name) for name, constant in constants.items()],
    )
    onnx.save(_model(graph), folder / "model.onnx")
    output = {"name": "probabilities", "dtype": "float32", "shape": [2], "labels": ["left", "right"]}
    fields = {
        "name": "sides",
        "description": "Knows where it is bright.",
        "kind": "oneshot",
        "inputs": [{"name": "image", "dtype": "uint8", "shape": [8, 8], "meaning": "grey", "units": ""}],
        "outputs": [output | {"meaning": "", "units": ""}],
        "recognition": None,
        "live": None,
    }
    return finish_pack(folder, fields)


def _slowness(products: int) -> list[onnx.NodeProto]:
    """Zeros, after products that depend on the picture so that nothing can leave them out."""
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["colour"], ["mean"], keepdims=0),
        node("Mul", ["mean", "nothing"], ["none"]),
        node("Expand", ["none", "square"], ["slow0"]),
    ]
    nodes += [node("MatMul", [f"slow{n}", f"slow{n}"], [f"slow{n + 1}"]) for n in range(products)]
    return [*nodes, node("ReduceMax", [f"slow{products}"], ["lateness"], keepdims=0)]


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def grey_of(number: int) -> int:
    """Grey value of the right half of frame `number`."""
    return GREY_FIRST + GREY_STEP * (number % IDS)


def number_of(grey: float) -> int:
    """The number of a frame, from its right half's brightness, 0 to 1."""
    return round((255 * grey - GREY_FIRST) / GREY_STEP)


def picture_of(number: int, width: int = 320, height: int = 240) -> Array:
    """RGB: the left half in the colour that belongs to the number, the right half the number itself."""
    picture_HWC = np.full((height, width, 3), grey_of(number), np.uint8)
    picture_HWC[:, : width // 2] = list(COLOURS.values())[number % len(COLOURS)]
    return picture_HWC


def write_wav(file: Path, samples: Array, rate_hz: int) -> None:
    """One channel of 16-bit sound."""
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate_hz)
        sound.writeframes(samples.astype("<i2").tobytes())


LISTENED_HZ = 8000
LISTENED_CHUNK = 400
SYMBOLS = ("-", "loud")


def write_live_pack(folder: Path) -> Path:
    """A pack whose network hears whether it is loud, in chunks of 50 ms; a state remembers half of what was before."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WEB, folder / "web")
    onnx.save(loud_network(), folder / "model.onnx")
    output = {"name": "symbols", "dtype": "float32", "shape": [1, 2], "labels": SYMBOLS, "units": "log-probability"}
    state = {"input": "state_0", "output": "next_0", "dtype": "float32", "shape": [1], "initial": 100.0}
    names = {"length": "length", "last": "last", "output_length": "output_length"}
    fields = {
        "name": "loud",
        "description": "Hears what is loud.",
        "kind": "live",
        "inputs": [{"name": "sound", "dtype": "int16", "shape": [LISTENED_CHUNK], "meaning": "sound", "units": "PCM"}],
        "outputs": [output | {"meaning": "log-probability of each symbol"}],
        "recognition": None,
        "live": {"rate_hz": float(LISTENED_HZ), "chunk": LISTENED_CHUNK, "states": [state], **names},
    }
    return finish_pack(folder, fields)


def loud_network() -> onnx.ModelProto:
    """One frame a chunk: how far the mean amplitude, half of it that of the chunks before, is above 1,000."""
    node = helper.make_node
    constants: dict[str, Array] = {
        "half": np.array(0.5, np.float32),
        "limits": np.array([0, -1000], np.float32),
        "slopes": np.array([0, 1], np.float32),
        "hundredth": np.array(0.01, np.float32),
        "one": np.array([1], np.int64),
        "ends": np.array([2], np.int64),
        "frames": np.array([1, 1, 2], np.int64),
    }
    nodes = [
        node("Cast", ["sound"], ["numbers"], to=TensorProto.FLOAT),
        node("Abs", ["numbers"], ["amplitudes"]),
        node("ReduceSum", ["amplitudes", "one"], ["sum"], keepdims=0),
        node("Cast", ["length"], ["count"], to=TensorProto.FLOAT),
        node("Div", ["sum", "count"], ["mean"]),
        node("Add", ["mean", "state_0"], ["both"]),
        node("Mul", ["both", "half"], ["next_0"]),
        node("Mul", ["next_0", "slopes"], ["scaled"]),
        node("Add", ["scaled", "limits"], ["scores"]),
        node("Mul", ["scores", "hundredth"], ["logits"]),
        node("LogSoftmax", ["logits"], ["log"], axis=-1),
        node("Reshape", ["log", "frames"], ["symbols"]),
        node("Cast", ["last"], ["over"], to=TensorProto.INT64),
        node("Sub", ["ends", "over"], ["behind"]),
        node("Div", ["ends", "behind"], ["enough"]),
        node("Min", ["enough", "one"], ["output_length"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "loud",
        [
            value("sound", TensorProto.INT16, [1, LISTENED_CHUNK]),
            value("length", TensorProto.INT64, [1]),
            value("last", TensorProto.BOOL, [1]),
            value("state_0", TensorProto.FLOAT, [1]),
        ],
        [
            value("symbols", TensorProto.FLOAT, [1, 1, 2]),
            value("output_length", TensorProto.INT64, [1]),
            value("next_0", TensorProto.FLOAT, [1]),
        ],
        [numpy_helper.from_array(constant, name) for name, constant in constants.items()],
    )
    return _model(graph)
