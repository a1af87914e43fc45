"""A bundle loaded back, as in a notebook: the same answers, or a sentence that says why not."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import penstock
from penstock.core.application import decoded_chunk
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.decode import decode_image
from penstock.core.dim import Dim
from penstock.core.errors import (
    ApplicationError,
    BundleCorrupt,
    BundleError,
    GoldenMismatch,
    InvalidInput,
    SourcesChanged,
)
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array, TensorSpec
from penstock.export import pack_writer
from penstock.export.pack_writer import export_pack
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import make_runnable
from penstock.runtime.load import load
from penstock.runtime.load_weights import check_weights, load_weights
from penstock.runtime.onnx import onnx_cache
from tests.support.small import APP_PY, Small, examples, network, small, write_app, written

DECODING: dict[str, Any] = {"decode": lambda body, _: np.frombuffer(body, "<f4"), "accepts": ("text/plain",)}


def from_file(folder: Path, text: str = APP_PY) -> Path:
    """An app.py and its bundle."""
    found = find_application(str(write_app(folder, text)))
    Bundle.write(found, found.model(), examples(), to=folder / "b")
    return folder / "b"


def test_the_object_that_made_it_loads_it_back(tmp_path: Path) -> None:
    made = written(tmp_path / "b")
    predictor = penstock.load(tmp_path / "b", app=small())
    assert (predictor.predict(examples()) == made.files.golden.outputs).all()
    assert not predictor.module.training


def test_a_file_is_found_again_without_being_named(tmp_path: Path) -> None:
    assert load(from_file(tmp_path)).application.name == "small"


def test_a_model_by_name_of_an_object_is_looked_up_in_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("__main__.InTheNotebook", Small, raising=False)
    made = written(tmp_path / "b", model=":InTheNotebook")
    assert (
        load(tmp_path / "b", app=small(model=":InTheNotebook")).predict(examples()) == made.files.golden.outputs
    ).all()
    by_path = load(tmp_path / "b", app=small(model="tests.support.small:Small"))
    assert type(by_path.module) is Small


@pytest.fixture(name="predictor", scope="module")
def predictor_(tmp_path_factory: pytest.TempPathFactory) -> penstock.Predictor:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    written(folder, **DECODING)
    return load(folder, app=small(**DECODING))


ONE = [0.5, -1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "inputs", [ONE, tuple(ONE), np.array(ONE), np.array(ONE, np.float32), torch.tensor(ONE), np.array(ONE, ">f4")]
)
def test_one_chunk_gives_one_output(predictor: penstock.Predictor, inputs: Any) -> None:
    output = predictor.predict(inputs)
    assert output.shape == (3,)
    assert output == pytest.approx(predictor.module(torch.tensor([ONE])).detach().numpy()[0], abs=1e-6)


@pytest.mark.parametrize("inputs", [[ONE, ONE], [np.array(ONE), np.array(ONE)], np.array([ONE, ONE])[:, ::1]])
def test_a_batch_gives_a_batch(predictor: penstock.Predictor, inputs: Any) -> None:
    assert predictor.predict(inputs).shape == (2, 3)


def test_an_empty_batch_gives_an_empty_one(predictor: penstock.Predictor) -> None:
    outputs = predictor.predict(np.zeros((0, 4)))
    assert (outputs.shape, outputs.dtype) == ((0, 3), np.float32)


def test_a_large_batch_goes_in_parts(predictor: penstock.Predictor) -> None:
    inputs = np.tile(np.array(ONE, np.float32), (2500, 1))
    inputs[:, 0] = np.arange(2500) / 2500
    outputs = predictor.predict(inputs)
    assert outputs.shape == (2500, 3)
    assert outputs[2400] == pytest.approx(predictor.predict(inputs[2400]), abs=1e-6)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([1, 2, 3], r"shape \[3\]; give \[4\] or a batch"),
        (np.zeros((2, 2, 4)), r"shape \[2, 2, 4\]"),
        (3, r"shape \[\]"),
        ([[1, 2, 3, 4], [1]], "ragged or no numbers"),
        (["a", "b", "c", "d"], "not only numbers"),
        ([None] * 4, "not only numbers"),
        (
            b"a file",
            r"^The input is bytes; predict takes arrays, float32\[4\]. Give a file's bytes or a text to answer.$",
        ),
        ("a text", "^The input is a string; predict takes arrays"),
        ({"wrong": ONE}, "^There is no input 'wrong'; there is 'input'"),
        ([1, 2, 3, float("nan")], "NaN or infinity"),
        ([1, 2, 3, 1e39], r"1.000e\+39; it must be a finite number"),
    ],
)
def test_what_is_no_input_is_refused(predictor: penstock.Predictor, inputs: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        predictor.predict(inputs)


def test_the_one_input_can_be_given_by_its_name(predictor: penstock.Predictor) -> None:
    name = predictor.application.input_tensor.name
    for inputs in (ONE, np.array([ONE, ONE], np.float32)):
        np.testing.assert_array_equal(predictor.predict({name: inputs}), predictor.predict(inputs))


def test_a_network_that_works_in_place_changes_nobody_elses_array(tmp_path: Path) -> None:
    class InPlace(Small):
        def forward(self, x_BF: Tensor) -> Tensor:
            return super().forward(x_BF.mul_(2))

    written(tmp_path / "b", model=Small)
    Bundle.write(small(model=InPlace), InPlace(), examples(), to=tmp_path / "b")
    predictor = load(tmp_path / "b", app=small(model=InPlace))
    mine = np.array(ONE, np.float32)
    predictor.predict(mine)
    mine.setflags(write=False)
    predictor.predict(mine)
    assert mine.tolist() == ONE


def test_a_network_with_predict_is_served_by_it(tmp_path: Path) -> None:
    class Probable(Small):
        def predict(self, x_BF: Tensor) -> Tensor:
            return self(x_BF).softmax(1)

    Bundle.write(small(model=Probable), Probable(), examples(), to=tmp_path / "b")
    assert load(tmp_path / "b", app=small(model=Probable)).predict(ONE).sum() == pytest.approx(1)


def test_an_answer_is_decoded_predicted_and_replied(predictor: penstock.Predictor) -> None:
    body = np.array(ONE, "<f4").tobytes()
    assert predictor.answer(body, "text/plain") == predictor.predict(ONE).tolist()
    with pytest.raises(InvalidInput, match=r"input is float32\[1\]; it must be float32\[4\]"):
        predictor.answer(body[:4])


def test_a_picture_is_answered(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x_BHW: Tensor) -> Tensor:
            return x_BHW.float().mean((1, 2))[:, None]

    def decode(body: bytes, content_type: str) -> Array:
        return decode_image(body, mode="L", size=(8, 8))

    grey = TensorSpec(dtype="uint8", shape=(8, 8), meaning="grey image")
    mean = TensorSpec(dtype="float32", shape=(1,), meaning="mean", name="mean")
    app = penstock.Application(
        name="mean",
        input=grey,
        output=mean,
        model=Mean,
        decode=decode,
        accepts=("image/png",),
        reply=lambda output: {"mean": float(output[0])},
    )
    Bundle.write(app, Mean(), np.zeros((1, 8, 8), np.uint8), to=tmp_path / "b")
    sink = io.BytesIO()
    Image.new("L", (16, 16), 77).save(sink, "PNG")
    assert load(tmp_path / "b", app=app).answer(sink.getvalue(), "image/png") == {"mean": 77.0}


NUMBERS = Dim("numbers", max=3)
ONE_SIZE = TensorSpec(dtype="float32", shape=(3,), meaning="numbers", name="x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros(2, np.float32), r"gives a ndarray; it must give a dictionary of arrays by name, x: float32"),
        ({"y": np.zeros(2, np.float32)}, r"gives the name 'y'; it must give a dictionary"),
        ({"x": [1.0]}, r"gives a list for 'x'; it must give"),
        ({"x": np.zeros(2)}, r"gives float64 for 'x'; it must give"),
    ],
)
def test_a_decode_that_gives_something_else_is_a_fault_of_the_application(given: Any, said: str) -> None:
    varying = replace(ONE_SIZE, shape=(NUMBERS,))
    app = small(input=varying, decode=lambda body, kind: given, accepts=("text/plain",))
    with pytest.raises(ApplicationError, match=f"the decode of 'small' {said}"):
        decoded_chunk(app, given)


def test_a_decode_of_one_tensor_gives_an_array() -> None:
    app = small(input=ONE_SIZE, decode=lambda body, kind: None, accepts=("text/plain",))
    for given, said in ((None, "a NoneType for 'x'"), (np.zeros(3), "float64 for 'x'"), ([1, 2, 3], "a list for 'x'")):
        with pytest.raises(ApplicationError, match=rf"'small' gives {said}; it must give an array, float32\[3\]"):
            decoded_chunk(app, given)
    for wrong in (np.zeros(2, np.float32), np.full(3, np.nan, np.float32)):
        # The body may have been so.
        with pytest.raises(InvalidInput):
            decoded_chunk(app, wrong)


def test_lengths_that_do_not_fit_are_the_fault_of_the_body() -> None:
    app = small(input=replace(ONE_SIZE, shape=(NUMBERS,)), decode=lambda body, kind: None, accepts=("a/b",))
    for given in ({"x": np.zeros(4, np.float32)}, {"x": np.zeros((1, 1), np.float32)}, {}):
        with pytest.raises(InvalidInput):
            decoded_chunk(app, given)


def test_without_a_decode_there_is_nothing_to_answer(tmp_path: Path) -> None:
    written(tmp_path / "b")
    with pytest.raises(InvalidInput, match=r"'small' has no decode; use predict\(\)"):
        load(tmp_path / "b", app=small()).answer(b"")


def test_a_bundle_of_an_object_asks_for_its_application(tmp_path: Path) -> None:
    written(tmp_path / "b")
    with pytest.raises(ApplicationError, match=r"has no reference to its application; name it with --app \(app=...\)"):
        load(tmp_path / "b")


@pytest.mark.parametrize("kind", [str, Path])
def test_an_application_that_moved_is_named(tmp_path: Path, kind: Any) -> None:
    folder = from_file(tmp_path / "old")
    (tmp_path / "old" / "app.py").unlink()
    with pytest.raises(ApplicationError, match=r"There is no file .*old/app.py.* put its file beside .*--app"):
        load(folder)
    moved = write_app(tmp_path / "new")
    assert load(folder, app=kind(moved)).files.changed_sources(find_application(str(moved))) == []
    with pytest.raises(ApplicationError, match=r"There is no file .*nowhere.py; give the path of an app.py.$"):
        bundle_application(load(folder, app=kind(moved)).files, "nowhere.py")


def test_an_application_that_moved_with_its_bundle_is_found_beside_it(tmp_path: Path) -> None:
    folder = from_file(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    bundle = tmp_path / "new" / folder.name
    assert bundle_application(load(bundle).files).reference == str(tmp_path / "new" / "app.py")
    write_app(tmp_path / "new", APP_PY.replace(".tanh()", ".sigmoid()"))
    with pytest.raises(SourcesChanged):
        load(bundle)


def test_changed_sources_are_refused_unless_accepted_and_golden_still_holds(tmp_path: Path) -> None:
    folder = from_file(tmp_path)
    write_app(tmp_path, APP_PY + "\n# a comment more\n")
    with pytest.raises(SourcesChanged, match=r"app.py of application 'small' changed"):
        load(folder)
    load(folder, accept_changed=True)
    write_app(tmp_path, APP_PY.replace(".tanh()", ".sigmoid()"))
    with pytest.raises(GoldenMismatch, match="the network's answers differ from the recorded ones by"):
        load(folder, accept_changed=True)
    write_app(tmp_path, APP_PY.replace("self.layer(x).tanh()", "self.layer(x).tanh()[:, :2]"))
    with pytest.raises(GoldenMismatch, match=r"shape \[5, 2\] where \[5, 3\] was recorded"):
        load(folder, accept_changed=True)


@pytest.mark.parametrize("change", [{"input": TensorSpec(dtype="float32", shape=(4,), meaning="others")}])
def test_an_object_with_other_specs_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    written(tmp_path / "b")
    with pytest.raises(BundleError, match=r"input is .* with another meaning; train it again"):
        load(tmp_path / "b", app=small(**change), accept_changed=True)


def test_another_network_is_refused_by_its_names_and_shapes(tmp_path: Path) -> None:
    written(tmp_path / "b")
    with pytest.raises(BundleError) as refusal:
        load(tmp_path / "b", app=small(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))))
    said = str(refusal.value)
    assert "0.weight [8, 4] is not in the file; 0.bias [8] is not in the file; 1.weight" in said
    assert "and 3 more. Use the application that they were trained with" in said
    with pytest.raises(BundleError, match=r"layer.weight is \[3, 4\] in the file and \[5, 4\] in the network"):
        load(tmp_path / "b", app=small(model=lambda: nn.ModuleDict({"layer": nn.Linear(4, 5)})))


def test_a_changed_network_of_other_shapes_is_refused_before_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = from_file(tmp_path)
    write_app(tmp_path, APP_PY.replace("self.layer = nn.Linear(4, 3)", "self.layer = nn.Linear(4, 3, bias=False)"))
    exports: list[str] = []
    for module in (onnx_cache, pack_writer):
        monkeypatch.setattr(module, "run_exporter", lambda module, *_, **__: exports.append(module))
    with pytest.raises(BundleError, match=r"do not fit the network: layer.bias \[3\] is not in the network"):
        make_runnable(bundle, Execution(cache=tmp_path / "cache", cores=1, accept_changed=True), lambda _: 2)
    with pytest.raises(BundleError, match=r"do not fit the network: layer.bias \[3\] is not in the network"):
        export_pack(bundle, to=tmp_path / "pack", accept_changed=True)
    assert exports == []


def test_weights_are_compared_with_a_network_that_is_made_without_memory(tmp_path: Path) -> None:
    save_file(network().state_dict(), tmp_path / "w")
    devices: list[torch.device] = []

    def make(outputs: int) -> nn.Module:
        layer = nn.Linear(4, outputs)
        devices.append(layer.weight.device)
        return nn.ModuleDict({"layer": layer})

    check_weights(lambda: make(3), tmp_path / "w")
    with pytest.raises(BundleError, match=r"layer.weight is \[3, 4\] in the file and \[5, 4\] in the network"):
        check_weights(lambda: make(5), tmp_path / "w")
    assert {device.type for device in devices} == {"meta"}


def test_a_network_that_reads_its_own_numbers_is_not_compared(tmp_path: Path) -> None:
    save_file(network().state_dict(), tmp_path / "w")
    # On the device without memory, this raises.
    check_weights(lambda: nn.Linear(4, int(torch.ones(1).item())), tmp_path / "w")


def test_whole_numbers_do_not_become_weights(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.ones(3, 4, dtype=torch.int64), "layer.bias": torch.ones(3)}, tmp_path / "w")
    with pytest.raises(BundleError, match=r"layer.weight is torch.int64 in the file and torch.float32 in the network"):
        load_weights(network(), tmp_path / "w")


def test_a_narrower_float_is_widened(tmp_path: Path) -> None:
    module = network().bfloat16()
    save_file(module.state_dict(), tmp_path / "w")
    target = network(1)
    load_weights(target, tmp_path / "w")
    assert torch.equal(target.layer.weight, module.layer.weight.float())


def test_tied_weights_that_were_stored_once_are_found(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

    module, target = Tied(), Tied()
    save_model(module, str(tmp_path / "w"))
    load_weights(target, tmp_path / "w")
    assert torch.equal(target.two.weight, module.one.weight)
    assert target.two.weight is target.one.weight


@pytest.mark.parametrize("data", [b"", b"not safetensors at all", b"\xff" * 64, b"\x02" + bytes(7) + b"{}" + b"x" * 9])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(BundleCorrupt, match="not a readable safetensors file"):
        load_weights(network(), tmp_path / "w")


def test_the_threads_of_a_step_can_be_chosen(tmp_path: Path) -> None:
    written(tmp_path / "b")
    before = torch.get_num_threads()
    try:
        load(tmp_path / "b", app=small(), threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
