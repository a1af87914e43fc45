"""`penstock bundle`, `penstock inspect` and `penstock apps`, as they are typed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from penstock.cli import build, main
from penstock.core.bundles.bundle import GOLDEN, MANIFEST, WEIGHTS, read_bundle
from penstock.core.source_files.find_application import find_application
from penstock.runtime.load import load
from tests.support.small import APP_PY, examples, network, write_app, written
from tests.support.text import TEXT
from tests.support.thorough import thorough

RECIPE = """
from types import SimpleNamespace
import numpy as np
from penstock.train.recipe import ArraySet, Loading

def data():
    {}
    held_out = ArraySet(inputs=np.full((50, 4), 0.25, np.float32), targets=np.zeros(50))
    return SimpleNamespace(train=held_out, validation=held_out)

import dataclasses
app = dataclasses.replace(app, recipe=lambda: SimpleNamespace(data=data, loading=Loading(), raw_examples=None))
"""


@pytest.fixture(name="folder")
def folder_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to type commands in, with an app.py and the weights of its network from elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_app(tmp_path)
    save_file(network().state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


def typed(*words: str) -> str:
    """What a command that succeeds prints."""
    result = CliRunner().invoke(build(), list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence on stderr of a command that is refused with status 2."""
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err.strip()
    assert left.value.code == 2
    assert said.startswith("penstock: ")
    assert said.endswith((".", ")"))
    return said


def bundled(*more: str) -> str:
    return typed("bundle", "app.py", "--weights", "weights.safetensors", "--out", "b", *more)


def test_weights_from_elsewhere_become_a_bundle(folder: Path) -> None:
    np.save("x.npy", examples(40))
    said = bundled("--examples", "x.npy", "--metrics", "accuracy=0.5", "--metrics", "loss=1e-3")
    assert "Golden examples: 32, from x.npy." in said
    files = read_bundle("b")
    assert files.manifest.content_hash in said
    assert files.manifest.metrics == {"accuracy": 0.5, "loss": 0.001}
    assert (files.golden.inputs == examples(40)[:32]).all()
    assert torch.equal(load("b").module.state_dict()["layer.weight"], network().layer.weight)


def test_a_reply_that_a_server_cannot_send_is_a_note(folder: Path) -> None:
    assert "Note: " not in bundled()
    write_app(
        folder, f"{APP_PY}\nimport dataclasses\napp = dataclasses.replace(app, reply=lambda scores: scores.tobytes())\n"
    )
    said = " ".join(bundled().split())
    assert "Note: the reply of 'small' fails on the answer of the network to example 0 (TypeError: Type is not" in said
    read_bundle("b")


def test_a_bundle_is_replaced_by_the_next(folder: Path) -> None:
    bundled()
    save_file(network(1).state_dict(), "weights.safetensors")
    bundled()
    assert torch.equal(load("b").module.state_dict()["layer.weight"], network(1).layer.weight)


def test_examples_come_from_the_recipes_validation_data(folder: Path) -> None:
    write_app(folder, APP_PY + RECIPE.format(""))
    assert "Golden examples: 32, from the recipe's validation data." in bundled()
    assert (read_bundle("b").golden.inputs == 0.25).all()


def test_without_examples_and_recipe_the_numbers_are_random_and_it_says_so(folder: Path) -> None:
    said = " ".join(bundled().split())
    assert "32, random numbers (seed 0), because 'small' has no recipe with data; real inputs are better" in said
    assert "real inputs are better: --examples FILE.npy" in said
    first = read_bundle("b").golden.inputs
    bundled()
    assert (read_bundle("b").golden.inputs == first).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("uint8", 0, 255), ("int16", -32768, 32767), ("int64", 0, 127), ("uint32", 0, 127), ("bool", 0, 1)],
)
def test_random_examples_fit_the_spec(folder: Path, dtype: str, low: int, high: int) -> None:
    text = APP_PY.replace('dtype="float32", shape=(4,)', f'dtype="{dtype}", shape=(4,)')
    write_app(folder, text.replace("self.layer(x)", "self.layer(x.float())"))
    bundled()
    inputs = read_bundle("b").golden.inputs
    assert inputs.dtype == dtype
    assert low <= inputs.min() < inputs.max() <= high
    assert inputs.max() > high * 0.8


def test_random_examples_are_within_the_limits(folder: Path) -> None:
    write_app(folder, APP_PY.replace("shape=(4,)", "shape=(4,), limits=(0.25, 0.5)"))
    bundled()
    inputs = read_bundle("b").golden.inputs
    assert 0.25 <= inputs.min() < inputs.max() <= 0.5


def test_an_npz_gives_its_inputs_or_its_only_array(folder: Path) -> None:
    np.savez("two.npz", inputs=examples(), targets=np.zeros(5))
    np.savez("one.npz", anything=examples())
    for file in ("two.npz", "one.npz"):
        bundled("--examples", file)
        assert (read_bundle("b").golden.inputs == examples()).all()


@pytest.fixture
def text_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with an application of two inputs of varying length, and weights for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT)
    save_file(find_application("text.py").model().state_dict(), tmp_path / "text.safetensors")


def text_bundle(*words: str) -> str:
    return typed("bundle", "text.py", "--weights", "text.safetensors", "--out", "b", *words)


@pytest.mark.usefixtures("text_weights")
def test_several_inputs_come_by_name_with_their_lengths() -> None:
    ids = np.arange(12).reshape(3, 4)
    np.savez("x.npz", input_ids=ids, attention_mask=np.ones((3, 4), int), tokens=[4, 1, 3])
    assert "Golden examples: 3, from x.npz." in text_bundle("--examples", "x.npz")
    golden = read_bundle("b").golden.inputs
    assert golden["tokens"].tolist() == [4, 1, 3]
    assert golden["input_ids"][1].tolist() == [4] + [0] * 11
    shown = typed("inspect", "b")
    for line in ("input_ids: int64[tokens<=12]", "attention_mask: int64", "logits: float32[3]", "tags: float32[tokens"):
        assert line in shown
    assert "real inputs are better: --examples FILE.npz" in " ".join(text_bundle().split())
    np.savez("equal.npz", input_ids=ids, attention_mask=np.ones((3, 4), int))
    text_bundle("--examples", "equal.npz")
    assert read_bundle("b").golden.inputs["tokens"].tolist() == [4, 4, 4]
    assert "random numbers" in text_bundle()
    assert len(set(read_bundle("b").golden.inputs["tokens"].tolist())) > 3


@pytest.mark.usefixtures("text_weights")
@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"input_ids": np.ones((2, 3), int)}, "write input_ids, attention_mask, as many rows of each"),
        ({"attention_mask": np.ones((3, 3), int)}, "as many rows of each"),
        ({"other": np.ones((2, 3), int)}, "as many rows of each"),
        ({"tokens": np.array([3, 4])}, "lengths up to their room"),
        ({"tokens": np.array([-1, 2])}, "lengths up to their room"),
        ({"tokens": np.array([1.5, 2])}, "lengths up to their room"),
        ({"tokens": np.array([0, 2])}, "0 tokens; it must have from 1 to 12"),
    ],
)
def test_several_inputs_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arrays: dict[str, Any], sentence: str
) -> None:
    given: dict[str, Any] = {"input_ids": np.ones((2, 3), int), "attention_mask": np.ones((2, 3), int)}
    given = arrays if list(arrays) == ["input_ids"] else given | arrays
    np.savez("x.npz", **given)
    words = ("bundle", "text.py", "--weights", "text.safetensors", "--out", "b", "--examples", "x.npz")
    assert sentence in refused(monkeypatch, capsys, *words)


class Unpickled:
    """Leaves a trace if a pickle of it is ever read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--weights", "net.pt"], "net.pt is a pickle, which can run any code .* with safetensors.torch.save_file"),
        (["--weights", "old.bin"], "old.bin is a pickle"),
        (["--weights", "text.safetensors"], "is not a safetensors file; write one with safetensors.torch.save_file"),
        (["--weights", "empty"], "empty is not a safetensors file"),
        (["--weights", "nowhere"], r"nowhere cannot be read \(No such file or directory\)"),
        (["--weights", "."], r"\. cannot be read"),
        (["--weights", "false.safetensors"], "false.safetensors is not a readable safetensors file"),
        (
            ["--weights", "other.safetensors"],
            r"layer.bias \[3\] is not in the file; layer.weight is \[4, 4\] in the file",
        ),
        (["--examples", "objects.npy"], "objects.npy is not an array that can be read"),
        (["--examples", "text.safetensors"], "is not an array that can be read"),
        (["--examples", "nowhere.npy"], "nowhere.npy is not an array that can be read"),
        (["--examples", "cut.npy"], "cut.npy is not an array that can be read"),
        (["--examples", "several.npz"], "several.npz holds a, b; call the array of raw inputs 'inputs'"),
        (["--examples", "wide.npy"], r"the examples are float32\[5, 5\]; 'small' needs at least one, float32\[N, 4\]"),
        (["--metrics", "accuracy"], "--metrics has 'accuracy'; write NAME=NUMBER, such as accuracy=0.97"),
        (["--metrics", "a=much"], "--metrics has 'a=much'"),
        (["--metrics", "=1"], "--metrics has '=1'"),
        (["--out", "precious"], "holds 'mine.txt', so it is not a bundle to be replaced"),
    ],
)
def test_what_cannot_be_bundled_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    trap = np.array([Unpickled()], object)
    torch.save({"a": Unpickled()}, "net.pt")
    torch.save({"a": Unpickled()}, "old.bin", _use_new_zipfile_serialization=False)
    np.save("objects.npy", trap, allow_pickle=True)
    np.save("wide.npy", np.zeros((5, 5), np.float32))
    np.savez("several.npz", a=examples(), b=examples())
    Path("cut.npy").write_bytes(Path("wide.npy").read_bytes()[:100])
    Path("text.safetensors").write_text("weights, honestly")
    Path("empty").touch()
    Path("false.safetensors").write_bytes(b"\x80" + bytes(7) + b'{"a": 1}' + bytes(120))
    save_file({"layer.weight": torch.zeros(4, 4)}, "other.safetensors")
    Path("precious").mkdir()
    Path("precious/mine.txt").touch()
    right = {"--weights": "weights.safetensors", "--out": "b"} | dict([words])
    said = refused(monkeypatch, capsys, "bundle", "app.py", *[word for pair in right.items() for word in pair])
    assert re.search(sentence, " ".join(said.split())), said
    assert not Path("unpickled").exists()
    assert not Path("b").exists()


def test_a_recipe_whose_data_is_not_there_asks_for_examples(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_app(folder, APP_PY + RECIPE.format("raise OSError('no disk')"))
    words = ("bundle", "app.py", "--weights", "weights.safetensors", "--out", "b")
    said = refused(monkeypatch, capsys, *words)
    assert "gives no data (OSError: no disk); give raw inputs with --examples FILE.npy." in said


def test_inspect_shows_what_is_in_a_bundle(folder: Path) -> None:
    bundled("--metrics", "accuracy=0.5")
    said = " ".join(typed("inspect", "b", "--run").split())
    manifest = read_bundle("b").manifest
    for part in (
        "Bundle small",
        manifest.content_hash,
        str(folder / "app.py"),
        "unchanged (app.py)",
        "input: float32[4], four numbers",
        "scores: float32[3], scores",
        "accuracy 0.5",
        "15",
        "32, all answers as recorded; the largest difference is 0 (0.0001 is allowed)",
        f"{WEIGHTS} {Path('b', WEIGHTS).stat().st_size:,} bytes",
        f"torch {manifest.versions['torch']}",
    ):
        assert part in said
    said = " ".join(typed("inspect", "b").split())
    assert "32, not run" in said
    assert "unchanged (app.py)" in said


def test_inspect_names_the_bundles_below_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled()
    for place in ("runs/one/bundle", "runs/two"):
        shutil.copytree("b", place)
    said = refused(monkeypatch, capsys, "inspect", "runs")
    assert "runs is not a bundle, and has bundles below it; name one: runs/one/bundle, runs/two." in said
    assert "there is one in runs/one/bundle" in refused(monkeypatch, capsys, "inspect", "runs/one")
    Path("empty").mkdir()
    assert "empty is not a bundle (no " in refused(monkeypatch, capsys, "inspect", "empty")


def test_inspect_tells_programs_the_same(folder: Path) -> None:
    bundled("--metrics", "accuracy=0.5", "--metrics", "loss=nan")
    told = json.loads(typed("inspect", "b", "--format", "json", "--run"), parse_constant=pytest.fail)
    assert told["content_hash"] == read_bundle("b").manifest.content_hash
    assert told["application"]["changed"] == []
    assert told["golden"] == {"examples": 32, "difference": 0.0}
    assert told["metrics"] == {"accuracy": 0.5, "loss": None}
    assert set(told["files"]) == {MANIFEST, WEIGHTS, GOLDEN}
    assert told["inputs"] == read_bundle("b").manifest.to_json()["inputs"]
    assert json.loads(typed("inspect", "b", "--format", "json"))["golden"]["difference"] is None


def test_inspect_says_which_sources_changed_and_whether_it_matters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled()
    write_app(folder, APP_PY + "raise SystemExit('it was run')\n")
    for options in ([], ["--accept-changed-app"]):
        said = " ".join(typed("inspect", "b", *options).split())
        assert "changed since: app.py" in said
        assert "32, not run" in said
    # Refused before it runs.
    assert "app.py of application 'small' changed since" in refused(monkeypatch, capsys, "inspect", "b", "--run")
    write_app(folder, APP_PY + "# a comment\n")
    said = " ".join(typed("inspect", "b", "--run", "--accept-changed-app").split())
    assert "changed since: app.py" in said
    assert "all answers as recorded" in said


def test_inspect_of_a_bundle_whose_application_is_not_here(folder: Path) -> None:
    bundled()
    (folder / "app.py").rename(folder / "moved.py")
    said = " ".join(typed("inspect", "b").split())
    assert "not compared: There is no file" in said
    assert "32, not run" in said
    # The file's name is part of what its sources are.
    assert "changed since: app.py, moved.py" in typed("inspect", "b", "--app", "moved.py")


def test_inspect_of_a_bundle_made_of_an_object(folder: Path) -> None:
    written(folder / "b")
    said = " ".join(typed("inspect", "b").split())
    assert "has no reference to its application; name it with --app" in said
    said = " ".join(typed("inspect", "b", "--app", "app.py", "--run").split())
    assert "none were recorded" in said
    assert "all answers as recorded" in said


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, GOLDEN])
@pytest.mark.parametrize("options", [[], ["--run"], ["--format", "json"]])
def test_inspect_refuses_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, options: list[str]
) -> None:
    bundled()
    file = folder / "b" / name
    file.write_bytes(file.read_bytes()[:-3] + b"\n}\n" if name == MANIFEST else file.read_bytes()[:-1] + b"\x55")
    if name == MANIFEST:
        file.write_bytes(file.read_bytes().replace(b"15", b"16"))
    assert f"{name} is not the file that was written" in refused(monkeypatch, capsys, "inspect", "b", *options)


@pytest.mark.parametrize("options", [[], thorough(["--format", "json"])])
def test_inspect_refuses_other_answers_after_showing_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    bundled()
    write_app(folder, APP_PY.replace(".tanh()", ".sigmoid()"))
    command = [sys.executable, "-m", "penstock", "inspect", "b", "--run", "--accept-changed-app", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "the network's answers differ from the recorded ones by" in done.stderr
    shown = " ".join(done.stdout.split())
    assert "differ from the recorded ones" in shown or json.loads(shown)["problem"] in " ".join(done.stderr.split())


def test_inspect_of_what_is_no_bundle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "inspect", "nowhere")
    assert "there is no folder nowhere; 'penstock train' writes a bundle" in said


def test_apps_lists_the_applications() -> None:
    said = " ".join(typed("apps").split())
    application = find_application("digits").application
    assert "digits" in said
    assert application.description.split()[0] in said
    assert "uint8[28" in said


@pytest.mark.parametrize(
    "words", ["apps", "--help", thorough("bundle --help"), "inspect --help", thorough("apps --help")]
)
def test_what_needs_no_network_loads_no_torch(words: str) -> None:
    code = (
        f"import contextlib, io, sys; sys.argv = ['penstock', *{words.split()!r}]\n"
        "from penstock.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit): main()\n"
        "loaded = {name.partition('.')[0] for name in sys.modules} & {'torch', 'sklearn', 'matplotlib', 'PIL'}\n"
        "assert said.getvalue() and not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_inspect_without_running_loads_no_torch(folder: Path) -> None:
    bundled()
    code = (
        "import sys; sys.argv = ['penstock', 'inspect', 'b']\n"
        "from penstock.cli import main\nimport contextlib\n"
        "with contextlib.suppress(SystemExit): main()\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "Bundle small" in done.stdout
