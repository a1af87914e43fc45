"""A network whose answer takes steps in a pack: two graphs, the Python engine, and networks that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from penstock import Application, Bundle, Dim, Generate, Prepare, RawSpec, load
from penstock.cli import build
from penstock.core.errors import PackCorrupt, PackError
from penstock.core.packs.pack import BEGIN, STEP, Pack, read_pack
from penstock.core.packs.signature import new_key, public_file, read_public_key
from penstock.core.source_files.find_application import find_application
from penstock.device.pack_engine import PackEngine
from penstock.export.graph_report import GraphReport
from penstock.export.pack_check import check_generation
from penstock.export.pack_graph import write_graph
from penstock.export.pack_session import packed_session
from penstock.export.pack_writer import export_pack
from penstock.models.encoder_decoder import EncoderDecoder
from penstock.nn.decoding import Beam, Greedy, Sampled
from tests.support.generating import (
    COUNTER,
    Counter,
    Endless,
    FunctionalCounter,
    counter,
    counter_bundle,
    digits,
    tensor,
)
from tests.support.shared import made_once

pytestmark = pytest.mark.slow
APP = "tests.support.generating:COUNTER"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    def make(folder: Path) -> None:
        counter_bundle(folder / "bundle")
        new_key(folder / "key.pem")
        export_pack(folder / "bundle", folder / "pack", app=APP, key=folder / "key.pem", int8=True)

    folder = made_once(tmp_path_factory, "counter", make)
    return read_pack(folder / "pack", read_public_key(str(public_file(folder / "key.pem"))))


def test_the_description_and_the_graphs_name_every_tensor(pack: Pack) -> None:
    fields = json.loads((pack.folder / "pack.json").read_bytes())
    model = fields["models"]["fp32"]
    assert (fields["kind"], model["file"], model["step"]) == ("generate", BEGIN, STEP)
    assert model["ms"] > 0 < model["step_ms"]
    assert {BEGIN, STEP} <= fields["files"].keys()
    assert "model.onnx" not in fields["files"]
    assert Generate.from_json(fields["generate"]) == COUNTER.generate
    begin, step = map(packed_session, pack.graphs())
    assert {made.name: made.shape for made in begin.get_inputs()} == {
        "digits": [1, "length"],
        "seed": [1],
        "most": [1],
        "length": [1],
    }
    assert {made.name: made.shape for made in step.get_inputs()} == {
        "state.memory": [1, "length", 4],
        "state.keys": [1, 2, "past", 4],
        "state.last": [1],
        "state.seed": [1],
        "state.past": [1],
        "state.length": [1],
    }
    # What a step returns as it was given is not copied out.
    assert {made.name for made in step.get_outputs()} == {
        "token",
        "sums",
        "step.done",
        "next.keys",
        "next.last",
        "next.past",
    }
    assert list(fields["models"]) == ["fp32"]


def test_the_python_engine_answers_as_the_bundle(pack: Pack) -> None:
    engine, predictor = PackEngine(pack), load(pack.folder.parent / "bundle", app=COUNTER)
    for seed in range(20):
        given = digits(1 + 2 * seed, seed) | {"seed": np.array(seed), "most": np.array(64 - seed)}
        expected, found = predictor.predict(given), engine.predict(given)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
        steps, wanted = engine.generate(given), predictor.generate(given)
        for one, other in zip(steps, wanted, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_step_that_was_exchanged_is_refused(pack: Pack, tmp_path: Path) -> None:
    copy = read_pack(pack.folder)
    object.__setattr__(copy, "folder", tmp_path)
    for file in ("golden.safetensors", BEGIN):
        (tmp_path / file).write_bytes((pack.folder / file).read_bytes())
    step = onnx.load(pack.folder / STEP)
    # Another multiple of the token before.
    (seven,) = (each for each in step.graph.initializer if onnx.numpy_helper.to_array(each).tolist() == 7)
    seven.CopyFrom(onnx.numpy_helper.from_array(np.array(8), seven.name))
    onnx.save(step, tmp_path / STEP)
    with pytest.raises(PackCorrupt, match=r"differs on its example . from the recorded answer in whole numbers"):
        PackEngine(copy)
    report = GraphReport(inputs=pack.inputs, outputs=pack.outputs, answers=pack.answers, generate=pack.generate)
    predictor = load(pack.folder.parent / "bundle", app=COUNTER)
    with pytest.raises(PackError, match="no pack is written: it differs in whole numbers"):
        check_generation(predictor, report, tmp_path / BEGIN)
    # Where the golden examples agree, inputs of other lengths do not.
    golden = replace(predictor.files.golden, outputs=report.network(tmp_path / BEGIN).answers(pack.golden().inputs))
    changed = replace(predictor, files=replace(predictor.files, golden=golden))
    with pytest.raises(PackError, match="it differs in whole numbers"):
        check_generation(changed, report, tmp_path / BEGIN)
    assert check_generation(predictor, report, pack.folder / BEGIN) == 0


class Eigen(Counter):
    def step(self, state: dict[str, Tensor]) -> Any:
        output, after, done = super().step(state)
        square = torch.eye(4).expand(len(output["sums"]), 4, 4) * output["sums"][:, None]
        return {**output, "sums": torch.linalg.eigvalsh(square)}, after, done


def test_an_operation_that_has_no_equivalent_is_named(tmp_path: Path) -> None:
    counter_bundle(tmp_path / "bundle", counter(Eigen))
    with pytest.raises(PackError, match=r"the network of 'counter' uses aten\._linalg_eigh"):
        export_pack(tmp_path / "bundle", tmp_path / "pack", app=f"{__name__}:EIGEN")
    assert not (tmp_path / "pack").exists()


EIGEN = counter(Eigen)


# Of torch's exporter, which the exporter process ignores.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("model", [FunctionalCounter, Endless])
def test_networks_that_write_anew_or_have_no_end_are_carried(model: Any, tmp_path: Path) -> None:
    application = counter(model)
    counter_bundle(tmp_path / "bundle", application)
    report = write_graph(load(tmp_path / "bundle", app=application), tmp_path / BEGIN)
    assert report.difference == 0


VOCABULARY, WIDTH, LAYERS, BEAMS = 40, 32, 2, 3
ENTRY = 2 * LAYERS * WIDTH
source, past = Dim("source", max=24), Dim("past", max=20)


def decoder() -> EncoderDecoder:
    return EncoderDecoder(
        VOCABULARY, width=WIDTH, heads=4, encoder_layers=LAYERS, decoder_layers=LAYERS, hidden=64, dropout=0.0
    )


def decoding(name: str) -> Application:
    """An application that chooses its tokens in one way."""
    number, entries = tensor("int64"), tensor("float32", source, ENTRY)
    one = {"memory": entries, "cache": tensor("float32", past, ENTRY), "token": number}
    wide = tensor("int64", BEAMS)
    models: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "greedy": (lambda: Greedy(decoder(), first=1, end=2), {}, {"token": number}, one),
        "sampled": (
            lambda: Sampled(decoder(), first=1, end=2, top_k=10, top_p=0.9),
            {"seed": tensor("int64", default=3)},
            {"token": number},
            {**one, "seed": number, "count": number},
        ),
        "beam": (
            lambda: Beam(decoder(), first=1, end=2, beams=BEAMS, shared=("memory", "source", "past")),
            {},
            {"token": wide, "parent": wide},
            {
                "memory": entries,
                "cache": tensor("float32", BEAMS, past, ENTRY),
                "token": wide,
                "score": tensor("float32", BEAMS),
                "count": wide,
                "ended": tensor("bool", BEAMS),
            },
        ),
    }
    model, inputs, outputs, state = models[name]
    return Application(
        name=name,
        inputs={"tokens": tensor("int64", source, limits=(0, VOCABULARY - 1)), **inputs},
        outputs=outputs,
        model=model,
        generate=Generate(state=state, max_steps=30),
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["greedy", "sampled", "beam"])
def test_every_choice_of_tokens_is_carried(name: str, tmp_path: Path) -> None:
    application = decoding(name)
    torch.manual_seed(0)
    texts = [{"tokens": np.random.default_rng(length).integers(3, VOCABULARY, length)} for length in (1, 2, 9, 24)]
    model: Any = application.model
    Bundle.write(application, model(), texts, to=tmp_path / "bundle")
    assert write_graph(load(tmp_path / "bundle", app=application), tmp_path / BEGIN).difference <= 1e-3


class Small(nn.Module):
    """The mean colour of four by four places."""

    def forward(self, rgba: Tensor) -> Tensor:
        chw = rgba[..., :3].permute(2, 0, 1)[None].float()
        return nn.functional.interpolate(chw, size=(4, 4), mode="bilinear", antialias=False)[0]


class Caption(nn.Module):
    """Each word is a function of a picture and of the word before."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 9)
        self.words = nn.Embedding(9, 9)

    def forward(self, picture: Tensor) -> Tensor:
        return self.head(picture.flatten(1) / 255)

    def begin(self, picture: Tensor) -> dict[str, Tensor]:
        seen = self(picture)
        return {"seen": seen, "word": torch.zeros(len(seen), dtype=torch.int64)}

    def step(self, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        word = (state["seen"] + self.words(state["word"])).argmax(-1)
        return word, {**state, "word": word}, word == 8


def pixels(body: bytes, kind: str) -> Any:
    return np.frombuffer(body, np.uint8).reshape(-1, 1, 4)


CAPTION = Application(
    name="caption",
    input=tensor("float32", 3, 4, 4),
    output=tensor("int64", name="word"),
    decode=pixels,
    accepts=("application/x-pixels",),
    prepare=Prepare(
        module=Small, raw=RawSpec(dtype="uint8", shape=(None, None, 4), max_shape=(64, 64, 4), meaning="RGBA")
    ),
    model=Caption,
    generate=Generate(state={"seen": tensor("float32", 9), "word": tensor("int64")}, max_steps=5),
)


def test_pictures_of_any_size_are_described_in_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (rows, 9, 4), dtype=np.uint8) for rows in (1, 8, 20)]
    found = find_application(f"{__name__}:CAPTION")
    torch.manual_seed(0)
    Bundle.write(found, found.model(), pictures, to=tmp_path / "bundle")
    engine = PackEngine(export_pack(tmp_path / "bundle", tmp_path / "pack").pack)
    predictor = load(tmp_path / "bundle")
    for picture in pictures:
        expected = predictor.predict(picture)
        np.testing.assert_array_equal(engine.predict({"raw": picture})["word"], expected)
        np.testing.assert_array_equal(engine.run(picture)[0], expected)
        assert [int(word) for word in engine.generate({"raw": picture})] == expected.tolist()


def test_the_command_says_what_was_checked(tmp_path: Path) -> None:
    counter_bundle(tmp_path / "bundle", replace(COUNTER))
    command = ["export", str(tmp_path / "bundle"), "--out", str(tmp_path / "pack"), "--app", APP, "--int8"]
    said = CliRunner().invoke(build(), command)
    assert said.exit_code == 0, (said.output, said.exception)
    size = sum((tmp_path / "pack" / name).stat().st_size for name in (BEGIN, STEP))
    assert "is allowed, and none of whole numbers)." in said.output
    assert "int8 was not tried: " in said.output
    assert f"Model: {size:,} bytes" in said.output
