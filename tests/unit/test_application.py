"""Applications: how one is declared, found by name, import path or file, and what its sources are."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.core.application import Application, describe, reply_of
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.record import RecordSpec
from penstock.core.source_files.find_application import application_names, find_application, find_chain
from penstock.core.spec import TensorSpec
from penstock.core.streams.live import Live
from tests.support.small import APP_PY, FOUR, THREE, Small, examples, network, small, write_app

NET_PY = "from torch import nn\n\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, {})\n"
RAW = Prepare(module=":Net", raw=RawSpec(dtype="uint8", shape=(4,), meaning="raw"))
BY_PATH = APP_PY.replace("model=Small", 'model="{}"')


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """Each test's modules are forgotten, as if each ran in a process of its own."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-" in file:
            del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": ""}, "name ''; use letters"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"name": "café"}, "name 'café'"),
        ({"name": "a b"}, "name 'a b'"),
        ({"name": 7}, "name 7"),
        ({"input": {"shape": [4]}}, "has input={'shape'.*; it must be a TensorSpec"),
        ({"output": None}, "has output=None; it must be a TensorSpec"),
        ({"model": None}, "has model=None; it must be a class or function"),
        ({"model": network()}, r"has model=Small\(.*not the network itself"),
        ({"decode": "app:decode", "accepts": ("image/png",)}, "has decode='app:decode'; it must be a function"),
        ({"decode": bytes}, "a decode but accepts nothing"),
        ({"reply": 3}, "has reply=3"),
        ({"accepts": "image/png"}, r"has accepts='image/png'; it must be a tuple .* such as \('image/png',\)"),
        ({"accepts": ("png",)}, "has accepts="),
        ({"accepts": ("image/PNG",)}, "in lower case"),
        ({"chunks": 0}, "has chunks=0; it must be a whole number, at least 1"),
        ({"chunks": 1.5}, "has chunks=1.5"),
        ({"max_body_bytes": "1M"}, "has max_body_bytes='1M'"),
        ({"max_body_bytes": 15}, r"max_body_bytes=15, less than one chunk of float32\[4\] \(16 bytes\)"),
    ],
)
def test_a_wrong_declaration_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        small(**fields)


TOKENS = Dim("tokens", max=8)
IDS = TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids")
SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="scores")


def several(**fields: Any) -> Application:
    inputs = {"ids": IDS, "mask": replace(IDS, dtype="bool")}
    given: dict[str, Any] = {"name": "text", "inputs": inputs, "outputs": {"scores": SCORES}, "model": Small}
    return Application(**(given | fields))


def test_several_tensors_have_the_names_of_their_keys() -> None:
    application = several()
    assert isinstance(application.input, RecordSpec)
    assert [(name, spec.name) for name, spec in application.inputs.items()] == [("ids", "ids"), ("mask", "mask")]
    assert application.output == application.outputs["scores"] == replace(SCORES, name="scores")
    assert replace(application, name="other").inputs == application.inputs
    told = describe(application)
    assert told["input"] is None
    assert [spec["name"] for spec in told["inputs"]] == ["ids", "mask"]
    assert told["output"]["name"] == told["outputs"][0]["name"] == "scores"


def test_in_a_copy_the_changed_form_of_a_side_wins() -> None:
    fixed, words = small(), several()
    longer = replace(fixed.input_tensor, shape=(5,))
    assert replace(fixed, input=longer).inputs == {longer.name: longer}
    assert isinstance(replace(fixed, inputs={"ids": IDS}).input, RecordSpec)
    assert replace(words, input=longer).input == longer
    assert list(replace(words, inputs={"only": IDS}, description="d").inputs) == ["only"]
    assert replace(replace(words, name="other"), outputs={"more": SCORES}).output.describe() == SCORES.describe()
    with pytest.raises(ApplicationError, match="give input or inputs, not both"):
        replace(fixed, input=longer, inputs={"ids": IDS})


def test_an_application_has_a_hash() -> None:
    assert hash(several()) == hash(several())
    assert hash(small()) != hash(several())


def test_one_tensor_of_fixed_size_may_have_any_name() -> None:
    assert list(several(inputs={"my-input": FOUR}, outputs={"class": THREE}).inputs) == ["my-input"]
    with pytest.raises(ApplicationError, match=r"has name 'my-input'; .* a Python identifier"):
        several(inputs={"my-input": IDS})


def test_the_short_form_has_names_of_its_own() -> None:
    nameless = replace(FOUR, name=""), replace(THREE, name="")
    application = small(input=nameless[0], output=nameless[1])
    assert list(application.inputs) == ["input"]
    assert list(application.outputs) == ["output"]
    assert application.input == application.input_tensor == replace(FOUR, name="input")
    assert isinstance(small(input=IDS).input, RecordSpec)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": {}}, r"has no input; give input=TensorSpec\(...\)"),
        ({"outputs": {}}, "has no output"),
        ({"inputs": [IDS]}, "has inputs=.*; it must be a dictionary of TensorSpecs by name"),
        ({"outputs": {"scores": 3}}, "has outputs=.*; it must be a dictionary of TensorSpecs by name"),
        ({"input": IDS}, "has input=.*; give input or inputs, not both"),
        ({"outputs": {"ids": SCORES}}, "an input and an output with the name 'ids'; exported graphs need different"),
        ({"inputs": {"": IDS}}, "has name ''"),
        ({"outputs": {"tokens": SCORES}}, "has name 'tokens'; give each a name of its own"),
        ({"outputs": {"tags": replace(SCORES, shape=(Dim("tokens", 9),))}}, "as tokens<=8 and as tokens<=9"),
        ({"live": Live(rate_hz=10), "chunks": 4}, "is live and has inputs ids: .*; a live signal has one input"),
        ({"decode": bytes, "accepts": ("a/b",), "prepare": RAW}, "has a prepare and inputs ids: .* one tensor"),
    ],
)
def test_a_wrong_declaration_of_several_tensors_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        several(**fields)


def test_where_one_tensor_is_needed_several_are_named() -> None:
    with pytest.raises(ApplicationError, match=r"has the inputs ids: int64.*here it must be one tensor of fixed size"):
        _ = several().input_tensor
    assert several().output_tensor.name == "scores"


def test_what_a_client_may_know() -> None:
    told = describe(small(accepts=("text/csv",), description="Scores."))
    assert told["name"] == "small"
    assert told["input"] == FOUR.to_json() | {"name": "input"}
    assert told["output"] == THREE.to_json()
    assert told["accepts"] == ["text/csv", "application/json", "application/octet-stream"]


def test_the_reply_is_the_output_as_lists_unless_the_application_says_otherwise() -> None:
    output = examples(1)[0, :3]
    assert reply_of(small())(output) == output.tolist()
    assert reply_of(small(reply=len))(output) == 3


def test_the_applications_of_penstock_are_found_by_name() -> None:
    assert "digits" in application_names()
    found = find_application("digits")
    assert found.reference == "digits"
    assert set(found.source_sha256()) == {"app.py", "model.py", "recipe.py"}


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("digts", "no application 'digts'; use one of detect, digits"),
        ("", "'' is not an application's name"),
        ("..digits", "'..digits' is not an application's name"),
        ("penstock.nowhere:app", "There is no application 'penstock.nowhere'"),
        ("no/app.py", "There is no file .*no/app.py; give the path of an app.py"),
        ("digits:other", "digits has no Application called 'other'; it has app: write 'digits:app'"),
        ("math", "math has no Application called 'app'; declare it as 'app'"),
    ],
)
def test_what_cannot_be_found_says_how_to_find_it(reference: str, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        find_application(reference)


def test_a_file_with_a_record_of_the_other_kind_says_what_it_is_for(tmp_path: Path) -> None:
    file = write_app(tmp_path, APP_PY)
    with pytest.raises(ApplicationError, match=r"it has the application '\w+': train it, and name the bundle"):
        find_chain(str(file))
    chain = tmp_path / "chain.py"
    chain.write_text('from penstock import Chain, ChainStep\nchain = Chain(name="all", steps=(ChainStep(part="a"),))\n')
    with pytest.raises(ApplicationError, match=r"it has the chain 'all', which has no weights: train its parts"):
        find_application(str(chain))


@pytest.mark.parametrize("folder", ["plain", "with space", "with:colon", "ünï"])
@pytest.mark.parametrize("attribute", ["", ":app", ":other"])
def test_a_file_is_found_again_by_its_reference(tmp_path: Path, folder: str, attribute: str) -> None:
    file = write_app(tmp_path / folder, APP_PY + "\nother = app\n")
    found = find_application(f"{file}{attribute}")
    again = find_application(found.reference)
    assert again.application is found.application
    assert found.reference == f"{file}{attribute if attribute == ':other' else ''}"
    assert again.source_sha256() == found.source_sha256()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = (", "app.py does not import: SyntaxError"),
        ("import nothing_of_this_name", "does not import: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("1 / 0", "does not import: ZeroDivisionError: division by zero"),
        (APP_PY.replace("Application(", "dict("), "has no Application called 'app'"),
        (APP_PY.replace("model=Small", "model=Small()"), "not the network itself"),
    ],
)
def test_a_file_that_is_wrong_says_so_each_time(tmp_path: Path, text: str, sentence: str) -> None:
    file = write_app(tmp_path, text)
    for _ in range(2):
        with pytest.raises(ApplicationError, match=sentence):
            find_application(str(file))


def test_who_wants_a_file_that_another_thread_still_imports_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = ModuleType("gate_of_the_test")
    begun, go_on, found = threading.Event(), threading.Event(), []
    vars(gate).update(begun=begun, go_on=go_on)
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    waits = "import gate_of_the_test\ngate_of_the_test.begun.set()\ngate_of_the_test.go_on.wait(60)\n"
    file = write_app(tmp_path, waits + APP_PY)
    threads = [threading.Thread(target=lambda: found.append(find_application(str(file)))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert not found
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found[0].application is found[1].application


def test_a_package_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_app(tmp_path / "a_package", "import a_missing_library")
    (tmp_path / "broken_module.py").write_text("raise OSError('no disk')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ApplicationError, match="needs the module 'a_missing_library'; install it"):
        find_application("a_package.app")
    with pytest.raises(ApplicationError, match="'broken_module' does not import: OSError: no disk"):
        find_application("broken_module")


def test_a_model_by_name_in_the_same_file(tmp_path: Path) -> None:
    found = find_application(str(write_app(tmp_path, BY_PATH.format(":Small"))))
    assert type(found.model()).__name__ == "Small"


@pytest.mark.parametrize("kind", ["file", "import path"])
def test_a_model_in_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "file":
        file = write_app(tmp_path / "mine", BY_PATH.format("net_beside:Net"))
        reference = str(file)
    else:
        file = write_app(tmp_path / "mine", BY_PATH.format("mine.net_beside:Net"))
        monkeypatch.syspath_prepend(tmp_path)
        reference = "mine.app"
    (file.parent / "net_beside.py").write_text(NET_PY.format(3))
    found = find_application(reference)
    assert found.model().out_features == 3
    assert set(found.source_sha256()) == {"app.py", "net_beside.py"}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (":Smal", "has model ':Smal', which cannot be imported .*write ':Name'"),
        ("Small", "has model 'Small', which cannot be imported"),
        ("nowhere_at_all:Net", "cannot be imported .*nowhere_at_all"),
        (".relative:Net", "cannot be imported"),
        ("bad_syntax:Net", "cannot be imported .*SyntaxError"),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, model: str, sentence: str) -> None:
    file = write_app(tmp_path, BY_PATH.format(model))
    (tmp_path / "bad_syntax.py").write_text("def")
    found = find_application(str(file))
    with pytest.raises(ApplicationError, match=sentence):
        found.model()


def test_a_model_that_wants_arguments_says_that_it_gets_none(tmp_path: Path) -> None:
    file = write_app(tmp_path, APP_PY.replace("def __init__(self)", "def __init__(self, width)"))
    with pytest.raises(
        ApplicationError, match=r"model of application 'small' cannot be made .*width.* without arguments"
    ):
        find_application(str(file)).model()


def test_an_application_without_a_recipe_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="'small' has no recipe; give it one"):
        find_application(str(write_app(tmp_path))).recipe()


def test_two_files_of_one_name_are_two_applications(tmp_path: Path) -> None:
    one = find_application(str(write_app(tmp_path / "one")))
    two = find_application(str(write_app(tmp_path / "two", APP_PY.replace('name="small"', 'name="large"'))))
    assert (one.application.name, two.application.name) == ("small", "large")
    assert type(one.model()) is not type(two.model())


@pytest.mark.parametrize("lazily", [True, False])
def test_two_modules_of_one_name_are_never_mixed_up(tmp_path: Path, lazily: bool) -> None:
    found: list[Any] = []
    text = BY_PATH.format("net_twice:Net") if lazily else "import net_twice\n" + BY_PATH.format("net_twice:Net")
    for folder, outputs in (("one", 3), ("two", 5)):
        file = write_app(tmp_path / folder, text)
        (file.parent / "net_twice.py").write_text(NET_PY.format(outputs))
        if folder == "two" and not lazily:
            with pytest.raises(
                ApplicationError, match=r"two/net_twice.py is imported as 'net_twice', but .*one/net_twice"
            ):
                find_application(str(file))
            return
        found.append(find_application(str(file)))
    assert found[0].model().out_features == 3
    with pytest.raises(ApplicationError, match="rename one of the two files, or use a process for each"):
        found[1].model()
    assert found[0].model().out_features == 3


def test_sources_are_what_is_imported_from_beside_directly_or_not(tmp_path: Path) -> None:
    file = write_app(
        tmp_path, "import stages.layers\nfrom labels_beside import NAMES\nimport json, penstock\n" + APP_PY
    )
    for name, text in {
        "stages/layers.py": "from . import blocks\nfrom .deep.er import depth\n",
        "stages/blocks.py": "import labels_beside\n",
        "stages/deep/__init__.py": "",
        "stages/deep/er.py": "from .. import blocks\ndepth = 1\n",
        "labels_beside.py": "NAMES = ()\n",
        "unused.py": "1 / 0\n",
        # An app.py at the root of penstock's own checkout does not have all of penstock for a source.
        "penstock/__init__.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = find_application(str(file))
    expected = {"app.py", "labels_beside.py", "stages/blocks.py", "stages/deep/__init__.py", "stages/deep/er.py"}
    assert set(found.source_sha256()) == expected | {"stages/layers.py"}


def test_sources_are_those_of_the_moment_it_was_found(tmp_path: Path) -> None:
    file = write_app(tmp_path)
    found = find_application(str(file))
    before = found.source_sha256()
    file.write_text(APP_PY + "\n# edited while it trained\n")
    assert found.source_sha256() == before
    assert find_application(str(file)).source_sha256() != before


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file = write_app(tmp_path)
    assert find_application(str(file)).application.description == "Four numbers in, three out."
    file.write_text(APP_PY.replace("Four numbers in", "Edited"))
    assert find_application(str(file)).application.description == "Edited, three out."


def test_an_edit_within_the_second_that_keeps_the_size_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = write_app(tmp_path)
    find_application(str(file))
    status = file.stat()
    file.write_text(APP_PY.replace("Four numbers in", "Five numbers in"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert find_application(str(file)).application.description == "Five numbers in, three out."


def test_the_same_sources_in_another_folder_have_the_same_hashes(tmp_path: Path) -> None:
    one, two = (find_application(str(write_app(tmp_path / name))) for name in ("here", "there/below"))
    assert one.source_sha256() == two.source_sha256()


def test_an_object_has_no_sources() -> None:
    from penstock.runtime.load import as_found

    found = as_found(small())
    assert type(found.model()) is Small


def test_the_applications_are_listed_without_torch() -> None:
    code = (
        "import sys\nfrom penstock.core.application import describe\n"
        "from penstock.core.source_files.find_application import application_names, find_application\n"
        "for name in application_names(): describe(find_application(name).application)\n"
        "assert application_names() and not {'torch', 'sklearn', 'PIL'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
