"""Weights that a training starts from: files, folders of Hugging Face, names, and what does not fit."""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock import Initial, Recipe
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import ApplicationError, TrainError
from penstock.core.source_files.find_application import FoundApplication
from penstock.train.initial_weights import load_initial, read_initial
from penstock.train.recipe import ArraySet, Data
from penstock.train.run import train
from tests.support.small import examples, network, small


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 2)


def saved(folder: Path, tensors: dict[str, torch.Tensor], name: str = "weights.safetensors") -> str:
    save_file({key: value.clone() for key, value in tensors.items()}, folder / name)
    return str(folder / name)


def test_every_tensor_is_that_of_the_file_and_its_hash_is_the_files(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    nn.init.normal_(theirs.state_dict()["body.1.running_mean"])
    source = saved(tmp_path, theirs.state_dict())
    started = load_initial(Initial(source), ours, tmp_path)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=0, atol=0)
    with open(source, "rb") as file:
        assert started.sha256 == hashlib.file_digest(file, "sha256").hexdigest()
    assert started.source == source


@pytest.mark.parametrize("parts", [1, 2])
def test_a_folder_of_hugging_face_is_read_whole_or_in_parts(tmp_path: Path, parts: int) -> None:
    theirs, ours = Net(), Net()
    state = theirs.state_dict()
    if parts == 1:
        saved(tmp_path, state, "model.safetensors")
    else:
        places = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(state)}
        for file in set(places.values()):
            saved(tmp_path, {name: state[name] for name in state if places[name] == file}, file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    started = load_initial(Initial("."), ours, tmp_path)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in state.items())
    assert len(started.sha256) == 64
    if parts == 2:
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(TrainError, match=r"lacks model-00002-of-00002.safetensors, which model.safetensors.index"):
            load_initial(Initial("."), ours, tmp_path)


def test_a_head_is_left_at_random_and_names_are_replaced(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    head = ours.head.weight.clone()
    state = {
        f"encoder.{name.removeprefix('body.')}": each for name, each in theirs.body.state_dict(prefix="body.").items()
    }
    state["head.weight"] = torch.zeros(1000, 5)
    source = saved(tmp_path, state)
    load_initial(Initial(source, skip=("head.*",), rename={"encoder.": "body."}), ours, tmp_path)
    assert torch.equal(ours.state_dict()["body.0.weight"], theirs.state_dict()["body.0.weight"])
    assert torch.equal(ours.head.weight, head)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
            self.out.weight = self.embed.weight

    theirs, ours = Tied(), Tied()
    load_initial(Initial(saved(tmp_path, {"embed.weight": theirs.embed.weight.detach()})), ours, tmp_path)
    assert torch.equal(ours.out.weight, theirs.embed.weight)


def test_half_precision_is_read_into_the_networks_own_type(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    load_initial(
        Initial(saved(tmp_path, {n: t.half() if t.is_floating_point() else t for n, t in theirs.state_dict().items()})),
        ours,
        tmp_path,
    )
    assert ours.head.weight.dtype == torch.float32
    torch.testing.assert_close(ours.head.weight, theirs.head.weight.half().float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"head.weight": None}, {}, r"1 tensor is missing: 'head.weight'. To use them, leave .* skip=\('head.\*',\)"),
        ({"head.more": torch.ones(1)}, {}, r"1 is not in the network: 'head.more'"),
        ({"head.weight": torch.zeros(9, 5)}, {}, r"'head.weight' is float32\[9, 5\], and float32\[2, 5\]"),
        ({"head.weight": torch.zeros(2, 5, dtype=torch.int8)}, {}, r"is int8\[2, 5\], and float32\[2, 5\]"),
        (
            {"head.weight": None, "haed.weight": torch.zeros(2, 5)},
            {},
            r"'head.weight' \(there is 'haed.weight'\); 1 is not .* rename=",
        ),
        ({}, {"skip": ("hed.*",)}, r"no tensor has a name like skip='hed.\*'"),
        ({"tail.bias": torch.zeros(2)}, {"rename": {"tail.": "head."}}, "two tensors of one name after rename="),
        (
            {"head.weight": torch.zeros(9, 5), "body.0.bias": torch.zeros(9)},
            {},
            r"leave them out with skip=\('body.0.\*', 'head.\*'\)",
        ),
        ({}, {"skip": ("*",)}, r"no tensor of .* would be loaded with skip=\('\*',\)"),
        (
            {},
            {"rename": {"encoder.": "body."}},
            "has a name that begins with 'encoder.', which rename has; names there",
        ),
        ({"head.bias": torch.tensor([1, torch.nan])}, {}, r"'head.bias' of .* has NaN or infinity; .*'head.bias',\)"),
        ({"body.1.running_var": torch.full((5,), torch.inf)}, {}, "has NaN or infinity"),
        (
            {"head.bias": torch.tensor([1, 1e300], dtype=torch.float64)},
            {},
            "'head.bias' of .* has numbers that float32 cannot hold; its type is float64",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_nothing_changes(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    ours = Net()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    state = {name: tensor for name, tensor in (Net().state_dict() | change).items() if tensor is not None}
    with pytest.raises(TrainError, match=said) as caught:
        load_initial(Initial(saved(tmp_path, state), **options), ours, tmp_path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there are no initial weights at"),
        (b"PK\x03\x04rest", "is a pickle"),
        (b"nothing", "not a readable safe"),
    ],
)
def test_a_source_that_is_none_is_said_in_one_sentence(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "w.bin").write_bytes(content)
    with pytest.raises(TrainError, match=said):
        load_initial(Initial("w.bin"), Net(), tmp_path)


def test_a_mask_may_hold_infinity_as_in_the_network(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    for each in (theirs, ours):
        each.register_buffer("mask", torch.tensor([0, -torch.inf]))
    load_initial(Initial(saved(tmp_path, theirs.state_dict())), ours, tmp_path)
    assert torch.equal(ours.head.weight, theirs.head.weight)


def test_the_same_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        saved(tmp_path, Net().state_dict(), name)
    index = {"weight_map": {"head.bias": "a.safetensors", "head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TrainError, match=r"b.safetensors has the tensor 'body.0.bias', which another file"):
        load_initial(Initial("."), Net(), tmp_path)


@pytest.mark.parametrize("source", ["~nosuchuser/x", "x" * 300, "file"])
def test_what_the_system_refuses_is_said_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    def refused(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "file").touch()
    monkeypatch.setattr("penstock.train.initial_weights._digest", refused)
    told: list[tuple[str, str]] = []

    class Told:
        def all_gather_objects(self, own: tuple[str, str]) -> list[tuple[str, str]]:
            told.append(own)
            return [own, ("", "")]

    with pytest.raises(TrainError, match=f"the initial weights '{source}' cannot be read"):
        load_initial(Initial(source), Net(), tmp_path, Told())  # pyright: ignore[reportArgumentType]
    assert len(told) == 1


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "x"])
def test_a_damaged_index_is_said_in_one_sentence(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(TrainError, match="lists no files by name; download"):
        load_initial(Initial("."), Net(), tmp_path)


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    saved(tmp_path, Net().state_dict(), "secret.safetensors")
    index = {"weight_map": dict.fromkeys(Net().state_dict(), "../secret.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TrainError, match=r"lacks secret.safetensors"):
        load_initial(Initial("model"), Net(), tmp_path)


@pytest.mark.parametrize("source", ["timm:resnet18", "torchvision:resnet18"])
def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    monkeypatch.setitem(sys.modules, source.partition(":")[0], None)
    with pytest.raises(TrainError, match=f"need the package {source.partition(':')[0]}.*install it where you train"):
        read_initial(source, tmp_path)


def test_torchvisions_names_are_those_of_networks_and_of_their_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # torchvision has no build beside this torch; tests/gpu reads its own.
    state = Net().state_dict()
    weights = SimpleNamespace(get_state_dict=lambda progress, check_hash: state)

    def get_weight(name: str) -> Any:
        if name != "Net_Weights.V1":
            raise ValueError("no such weights")
        return weights

    replaced: Any = ModuleType("torchvision")
    replaced.models = SimpleNamespace(
        list_models=lambda: ["net"],
        get_weight=get_weight,
        get_model_weights=lambda name: SimpleNamespace(DEFAULT=weights),
    )
    monkeypatch.setitem(sys.modules, "torchvision", replaced)
    for name in ("net", "Net_Weights.V1"):
        ours = Net()
        started = load_initial(Initial(f"torchvision:{name}"), ours, tmp_path)
        assert torch.equal(ours.head.weight, state["head.weight"])
        assert started.source == f"torchvision:{name}"
    with pytest.raises(TrainError, match="has no network 'nett'; the closest name is 'net'"):
        read_initial("torchvision:nett", tmp_path)
    with pytest.raises(TrainError, match=r"no weights of 'Net_Weights.V9' .*no such weights"):
        read_initial("torchvision:Net_Weights.V9", tmp_path)


def test_the_hash_of_a_librarys_weights_is_that_of_every_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"b": torch.ones(2), "a": torch.zeros((), dtype=torch.int64)}
    replaced: Any = ModuleType("torchvision")
    weights = SimpleNamespace(get_state_dict=lambda progress, check_hash: state)
    replaced.models = SimpleNamespace(
        list_models=lambda: ["n"], get_model_weights=lambda n: SimpleNamespace(DEFAULT=weights)
    )
    monkeypatch.setitem(sys.modules, "torchvision", replaced)
    first = read_initial("torchvision:n", tmp_path)[1]
    state = dict(reversed(state.items()))
    assert read_initial("torchvision:n", tmp_path)[1] == first
    state["b"][1] = 2
    assert read_initial("torchvision:n", tmp_path)[1] != first


@pytest.mark.parametrize(
    "fields", [{"source": 3}, {"source": ""}, {"source": "a", "skip": "head"}, {"source": "a", "rename": ["a"]}]
)
def test_a_wrong_declaration_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApplicationError, match=r"Initial has .*; it must be"):
        Initial(**fields)


def test_an_application_takes_a_source_or_an_initial() -> None:
    assert small(initial="w.safetensors").initial == "w.safetensors"
    with pytest.raises(ApplicationError, match="it must be an Initial, or its source"):
        small(initial=3)


def recipe_of(steps: int) -> Recipe:
    held = ArraySet(inputs=examples(8), targets=np.zeros((8, 3), np.float32))
    return Recipe(
        data=lambda: Data(train=held, validation=held),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
        batch_size=8,
        steps=steps,
    )


@pytest.mark.thorough
def test_a_run_records_them_and_neither_its_resumption_nor_the_bundle_reads_them(tmp_path: Path) -> None:
    theirs = network(seed=5)
    source = saved(tmp_path, theirs.state_dict())
    application = small(initial=source, recipe=lambda: recipe_of(2))
    found = FoundApplication(application=application, module=sys.modules[__name__], reference="")
    run = tmp_path / "run"
    train(found, run, recipe_of(2), overrides={}, quiet=True)
    manifest = read_bundle(run / "bundle").manifest
    assert manifest.initial is not None
    assert manifest.initial.source == source
    assert json.loads((run / "run.json").read_text())["initial"] == manifest.to_json()["initial"]
    trained = penstock.load(run / "bundle", app=application).predict(examples())
    with torch.no_grad():
        np.testing.assert_allclose(trained, theirs(torch.from_numpy(examples())).numpy(), atol=1e-6)
    Path(source).unlink()
    # Loading needs no source, and neither does a resumed run.
    penstock.load(run / "bundle", app=application)
    train(found, run, recipe_of(2), overrides={}, quiet=True)
    assert read_bundle(run / "bundle").manifest.initial == manifest.initial
    with pytest.raises(TrainError, match="there are no initial weights at"):
        train(found, tmp_path / "other", recipe_of(2), overrides={}, quiet=True)


def test_fit_starts_from_them_unless_it_is_resumed(tmp_path: Path) -> None:
    theirs, ours = network(seed=5), network(seed=6)
    source = saved(tmp_path, theirs.state_dict())
    targets = np.zeros((5, 3), np.float32)

    def fitted(steps: int, folder: Path) -> Any:
        return penstock.fit(
            ours,
            (examples(), targets),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
            steps=steps,
            device="cpu",
            out=folder,
            quiet=True,
            initial=source,
        ).network

    torch.testing.assert_close(fitted(1, tmp_path / "run").layer.weight, theirs.layer.weight, rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["initial"]["source"] == source
    Path(source).unlink()
    torch.testing.assert_close(fitted(1, tmp_path / "run").layer.weight, theirs.layer.weight, rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["initial"]["source"] == source


def test_processes_that_find_other_weights_stop_all(tmp_path: Path) -> None:
    source = saved(tmp_path, Net().state_dict())

    class Others:
        def all_gather_objects(self, own: tuple[str, str]) -> list[tuple[str, str]]:
            return [own, ("", "0" * 64)]

    with pytest.raises(TrainError, match="are not the same in process 1 as in another"):
        load_initial(Initial(source), Net(), tmp_path, Others())  # pyright: ignore[reportArgumentType]
