"""Bundles as files: written whole or not at all, refused when anything in them is another, never more than replaced."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.bundles import bundle as bundle_files
from penstock.core.bundles.bundle import GOLDEN, MANIFEST, WEIGHTS, Manifest, read_bundle, read_manifest
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, BundleCorrupt, BundleError, SourcesChanged
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import TensorSpec
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from tests.support.small import APP_PY, FOUR, Small, examples, network, small, write_app, written

FILES = (MANIFEST, WEIGHTS, GOLDEN)


# What is written


def test_a_bundle_is_three_files_and_says_what_it_is(tmp_path: Path) -> None:
    made = Bundle.write(small(), network(), examples(), to=tmp_path / "b", metrics={"accuracy": np.float32(0.5)})  # pyright: ignore[reportArgumentType]
    assert sorted(entry.name for entry in made.folder.iterdir()) == sorted(FILES)
    manifest = Bundle.open(tmp_path / "b").manifest
    assert (manifest.name, manifest.parameters, manifest.metrics) == ("small", 15, {"accuracy": 0.5})
    assert (manifest.reference, manifest.sources) == ("", {})
    assert {"python", "torch", "numpy", "penstock"} == set(manifest.versions)
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]


def test_the_first_32_examples_are_kept(tmp_path: Path) -> None:
    made = Bundle.write(small(), network(), examples(40), to=tmp_path / "b")
    assert (made.files.golden.inputs == examples(40)[:32]).all()
    assert made.files.golden.outputs.shape == (32, 3)


def test_a_metric_that_is_no_number_is_null_in_json_and_nan_in_python(tmp_path: Path) -> None:
    Bundle.write(
        small(), network(), examples(), to=tmp_path / "b", metrics={"loss": float("nan"), "worst": float("inf")}
    )
    assert json.loads((tmp_path / "b" / MANIFEST).read_text())["metrics"] == {"loss": None, "worst": None}
    assert np.isnan(Bundle.open(tmp_path / "b").manifest.metrics["loss"])


def test_the_tolerance_grows_with_the_outputs(tmp_path: Path) -> None:
    class Large(Small):
        def forward(self, x_BF: Tensor) -> Tensor:
            return super().forward(x_BF) * 1e6

    assert written(tmp_path / "b").manifest.tolerance == 1e-4
    made = Bundle.write(small(model=Large), Large(), examples(), to=tmp_path / "large")
    assert made.manifest.tolerance == pytest.approx(1e-4 * float(np.abs(made.files.golden.outputs).max()))


def test_the_content_hash_is_the_same_anywhere(tmp_path: Path) -> None:
    hashes: set[str] = set()
    for place in ("here", "there/below"):
        found = find_application(str(write_app(tmp_path / place)))
        module = found.model()
        module.load_state_dict(network().state_dict())
        hashes.add(Bundle.write(found, module, examples(), to=tmp_path / place / "b").manifest.content_hash)
    assert len(hashes) == 1
    manifest = read_bundle(tmp_path / "here" / "b").manifest
    assert replace(manifest, reference="elsewhere", versions={"torch": "9"}).content_hash in hashes
    for other in (
        replace(manifest, name="other"),
        replace(manifest, files=manifest.files | {WEIGHTS: "0"}),
        replace(manifest, sources={"app.py": "0"}),
        replace(manifest, inputs=(replace(FOUR, units="m"),)),
    ):
        assert other.content_hash not in hashes


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one"), written(tmp_path / "two")
    assert all((one.folder / name).read_bytes() == (two.folder / name).read_bytes() for name in FILES)


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        made = written(tmp_path / "b")
    finally:
        os.umask(before)
    assert made.folder.stat().st_mode & 0o777 == 0o750
    assert (made.folder / WEIGHTS).stat().st_mode & 0o777 == 0o640


class Uneven(nn.Module):
    """Two names for one weight, another in bfloat16, one that is not contiguous, buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.bf16 = nn.Parameter(torch.randn(4, 3).bfloat16())
        self.across = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.tied(self.first(x_BF)) @ (self.bf16.float() + self.across)


def test_tied_bf16_and_non_contiguous_weights_come_back_exactly(tmp_path: Path) -> None:
    module = Uneven()
    made = Bundle.write(small(model=Uneven), module, examples(), to=tmp_path / "b")
    assert made.manifest.parameters == 16 + 12 + 12
    back = load(tmp_path / "b", app=small(model=Uneven))
    for name, tensor in module.state_dict().items():
        assert back.module.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(back.module.state_dict()[name], tensor)
    assert isinstance(back.module, Uneven)
    assert back.module.tied.weight is back.module.first.weight
    assert (back.predict(examples()) == made.files.golden.outputs).all()


def test_a_network_without_parameters_is_a_bundle_too(tmp_path: Path) -> None:
    class Cut(nn.Module):
        def forward(self, x_BF: Tensor) -> Tensor:
            return x_BF[:, :3]

    Bundle.write(small(model=Cut), Cut(), examples(), to=tmp_path / "b")
    assert load(tmp_path / "b", app=small(model=Cut)).predict(examples()).shape == (5, 3)


def test_writing_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    written(tmp_path / "b")
    assert torch.equal(torch.rand(3), expected)


# What is not written


class Opinionated(Small):
    """Keeps what it learned where no state_dict finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.rand(())

    def forward(self, x_BF: Tensor) -> Tensor:
        return super().forward(x_BF) + self.shift


class Undecided(Small):
    def forward(self, x_BF: Tensor) -> Tensor:
        return super().forward(x_BF) + torch.rand(())


class Remembering(Small):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class Wrong(Small):
    """Answers with whatever is asked of it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x_BF: Tensor) -> Any:
        return self.answer(super().forward(x_BF))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda y: y[:, :2], r"gives float32\[5, 2\] for 5 chunks, but its output is declared as float32\[3\]"),
        (lambda y: y[0], r"gives float32\[3\] for 5 chunks"),
        (lambda y: y.double(), r"gives float64\[5, 3\]"),
        (lambda y: y.bfloat16(), "cannot answer its examples.*BFloat16"),
        (lambda y: (y, y), "gives 2 values, but the application's outputs are 'scores'"),
        (lambda y: y @ y, r"cannot answer its examples, float32\[5, 4\] \(RuntimeError"),
        (lambda y: y * float("nan"), "answers its examples with NaN"),
    ],
)
def test_a_network_that_does_not_give_its_output_is_refused(tmp_path: Path, answer: Any, sentence: str) -> None:
    with pytest.raises((ApplicationError, BundleError), match=sentence):
        Bundle.write(small(), Wrong(answer), examples(), to=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_tensors_of_a_network_that_raises_are_named_with_their_shapes(tmp_path: Path) -> None:
    class Raising(nn.Module):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            raise ValueError("no such time")

    inputs = {
        "t": TensorSpec(dtype="int64", shape=(), meaning="a time"),
        "x": TensorSpec(dtype="float32", shape=(Dim("n", max=9), 4), meaning="numbers"),
    }
    output = TensorSpec(dtype="float32", shape=(3,), meaning="scores")
    several = Application(name="several", inputs=inputs, output=output, model=Raising)
    given = [{"t": np.array(1), "x": np.zeros((n, 4), np.float32)} for n in (2, 5)]
    said = r"cannot answer its examples, t int64\[2\], x float32\[2, 5, 4\] \(ValueError: no such time\)"
    with pytest.raises(ApplicationError, match=said):
        Bundle.write(several, Raising(), given, to=tmp_path / "b")


@pytest.mark.parametrize(
    ("application", "module", "sentence"),
    [
        (small(), nn.Linear(4, 3), "not the one given .*Missing key.*layer.weight"),
        (small(), nn.Sequential(nn.Linear(4, 3)), "not the one given"),
        (small(model=Opinionated), Opinionated(), "not the one given .*differ.*in parameters and buffers"),
        (
            small(model=Undecided),
            Undecided(),
            r"gives other answers each time \(most in example .*\); draw random numbers in training alone",
        ),
        (small(model=dict), Small(), "The model of application 'small' gives a dict; it must make a torch.nn.Module"),
        (small(), Remembering(), "'_extra_state', a dict; a bundle carries tensors only"),
        ("digits", Small(), "'digits' is no Application; give the record"),
    ],
)
def test_what_could_not_be_loaded_is_not_written(tmp_path: Path, application: Any, module: Any, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        Bundle.write(application, module, examples(), to=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            np.zeros((0, 4), np.float32),
            r"the examples are float32\[0, 4\]; 'small' needs at least one, float32\[N, 4\]",
        ),
        (np.zeros(4, np.float32), r"the examples are float32\[4\]"),
        (np.zeros((2, 5), np.float32), r"the examples are float32\[2, 5\]"),
        (np.full((2, 4), np.nan, np.float32), "NaN or infinity"),
        (np.array([["a"] * 4]), r"not only numbers; it must be float32\[4\]\); 'small' needs"),
        ([{"x": [1, 2, 3, 4]}], r"are dictionaries; 'small' needs .*: give the values themselves, not by name\.$"),
        ({"x": [[1, 2, 3, 4]]}, "are dictionaries; .* give the values themselves"),
        ([[1, 2, 3, 4], [1]], "the examples are not an array"),
        (7, "the examples are not an array"),
    ],
)
def test_examples_that_are_no_inputs_are_refused(tmp_path: Path, given: Any, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        Bundle.write(small(), network(), given, to=tmp_path / "b")


@pytest.mark.parametrize("given", [[[1, 2, 3, 4]], np.ones((1, 4)), torch.ones(1, 4), np.ones((4, 1), np.float32).T])
def test_examples_may_be_anything_that_holds_such_numbers(tmp_path: Path, given: Any) -> None:
    made = Bundle.write(small(), network(), given, to=tmp_path / "b")
    assert made.files.golden.inputs.dtype == np.float32


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_out_of_range_is_refused(tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(BundleError, match=f"the tolerance is {tolerance}; it must be"):
        Bundle.write(small(), network(), examples(), to=tmp_path / "b", tolerance=tolerance)


# What is refused when it is read


def test_a_folder_without_a_bundle_says_where_one_may_be(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"is not a bundle \(no manifest.json\); 'penstock train' writes one to RUN/bundle"
    ):
        read_bundle(tmp_path)
    (tmp_path / "pack.json").touch()
    with pytest.raises(BundleError, match=r"it is a pack, for devices and browsers\. Name the bundle from which"):
        read_bundle(tmp_path)
    written(tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"there is one in .*bundle"):
        read_bundle(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_seen(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "b").folder / name
    data = file.read_bytes()
    for place in sorted({*range(0, len(data), max(1, len(data) // 150)), len(data) - 1}):
        # Each bit by turns, and a space to a newline, which JSON would not mind.
        for mask in (1 << place % 8, 0x2A):
            file.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            with pytest.raises(BundleCorrupt):
                read_bundle(tmp_path / "b")
    file.write_bytes(data)
    read_bundle(tmp_path / "b")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "missing", "a folder"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = written(tmp_path / "b").folder / name
    data = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"cut": data[:-1], "longer": data + b" ", "empty": b""}[damage])
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        read_bundle(tmp_path / "b")


def sealed(fields: dict[str, Any]) -> bytes:
    return bundle_files._with_hash(fields)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 1}, "schema version 1; this penstock reads 2. Write the bundle again"),
        ({"schema_version": None}, "schema version None"),
        ({"schema_version": "1"}, "schema version '1'"),
        ({"unknown": 1}, "not readable .*unknown"),
        ({"name": 7}, "a field is of another type"),
        ({"files": []}, "a field is of another type"),
        ({"files": {}}, "does not name weights.safetensors"),
        ({"metrics": None}, "not readable"),
        ({"metrics": {"a": "b"}}, "not readable"),
        ({"tolerance": "much"}, "a field is of another type"),
        ({"inputs": [None]}, "tensor spec is not readable"),
        ({"inputs": [FOUR.to_json() | {"dtype": "text"}]}, "tensor spec is not readable"),
        ({"inputs": [FOUR.to_json() | {"shape": [5]}]}, r"golden.safetensors holds float32\[5, 4\] for float32\[5\]"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    file = written(tmp_path / "b").folder / MANIFEST
    fields = json.loads(file.read_text())
    del fields["sha256"]
    file.write_bytes(sealed(fields | change))
    with pytest.raises(BundleCorrupt, match=sentence):
        read_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "7", '"x"', "{", "[" * 100_000, "\xff", "{}", '{"schema_version": NaN}']
)
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (written(tmp_path / "b").folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleCorrupt, match=r"manifest\.json"):
        read_bundle(tmp_path / "b")


def test_a_folder_that_may_not_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # A superuser may read everything.
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        with pytest.raises(BundleCorrupt) as refusal:
            read_manifest(tmp_path)
    assert str(refusal.value).endswith(" cannot be read (Permission denied); let the user who runs this read it.")


def test_an_edited_manifest_is_refused_though_it_is_well_formed(tmp_path: Path) -> None:
    file = written(tmp_path / "b").folder / MANIFEST
    for old, new in (('"tolerance": 0.0001', '"tolerance": 9999.0'), ('"a"', '"z"'), ("four numbers", "more numbers")):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(BundleCorrupt, match="not the file that was written"):
            read_bundle(tmp_path / "b")
        file.write_text(text)


def test_every_field_of_the_manifest_comes_back() -> None:
    manifest = Manifest(
        name="n",
        reference="r",
        sources={"a.py": "1"},
        inputs=(FOUR,),
        outputs=(TensorSpec(dtype="bool", shape=(), meaning="m"),),
        files={"f": "2"},
        tolerance=0.5,
        metrics={"m": 1e-300},
        versions={"v": "3"},
        parameters=2**60,
    )
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_changed_sources_are_named_and_can_be_accepted(tmp_path: Path) -> None:
    file = write_app(tmp_path, "import beside_small\n" + APP_PY)
    (tmp_path / "beside_small.py").write_text("A = 1\n")
    found = find_application(str(file))
    files = Bundle.write(found, found.model(), examples(), to=tmp_path / "b").files
    files.check_sources(found)
    (tmp_path / "beside_small.py").write_text("A = 2\n")
    changed = find_application(str(file))
    assert files.changed_sources(changed) == ["beside_small.py"]
    with pytest.raises(SourcesChanged, match=r"beside_small.py of application 'small' changed .*--accept-changed-app"):
        files.check_sources(changed)
    files.check_sources(changed, accept_changed=True)
    file.write_text(file.read_text().replace('("a", "b", "c")', '("a", "c", "b")'))
    other = find_application(str(file))
    with pytest.raises(BundleError, match=r"output is .* with another labels; train it again"):
        files.check_sources(other, accept_changed=True)
