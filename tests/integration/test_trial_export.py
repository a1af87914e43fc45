"""The export of the untrained network beside the first steps: what it reports, and how it ends."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import CheckedNetwork, check_examples
from penstock.runtime.load import make_network
from penstock.train.early_export import TrialExport

LIMIT_S = 170
APPLICATION = '''"""A network to export."""

import numpy as np
import torch
from torch import nn

from penstock import Application, Prepare, RawSpec, TensorSpec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        {body}


class Doubled(nn.Module):
    def forward(self, x):
        {prepared}


app = Application(
    name="tried",
    input=TensorSpec(dtype="float32", shape=(3,), meaning="numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="scores"),
    {prepare}model=Net,
)
'''
SOUND = "return self.layer(x)"
# A count of the batch's numbers, which only their values tell.
UNTRACEABLE = "return self.layer(x) * (1 if torch.unique(x).numel() > 2 else 2)"
PREPARE = (
    'prepare=Prepare(module=Doubled, raw=RawSpec(dtype="float32", shape=(None,), meaning="n", max_shape=(9,))),\n    '
    'decode=lambda body: np.frombuffer(body, np.float32), accepts=("application/octet-stream",),\n    '
)


def checked(folder: Path, *, body: str = SOUND, prepared: str | None = None) -> CheckedNetwork:
    file = folder / "app.py"
    prepare = PREPARE if prepared else ""
    file.write_text(APPLICATION.format(body=body, prepared=prepared or "return x[:3]", prepare=prepare))
    found = find_application(str(file))
    examples = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    network = check_examples(found, make_network(found), list(examples) if prepared else examples)
    assert network is not None
    return network


def said_of(network: CheckedNetwork) -> list[str]:
    said: list[str] = []
    with TrialExport(network, said.append, wait_s=0):
        deadline_s = time.monotonic() + LIMIT_S
        while any(thread.name == "trial-export" for thread in threading.enumerate()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    return said


def test_a_bundle_that_cannot_be_written_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = checked(tmp_path)
    # A file takes the place of the temporary folders, as a full disk refuses what is written there.
    monkeypatch.setattr("penstock.train.early_export.TemporaryDirectory", lambda **_: nullcontext(tmp_path / "app.py"))
    assert said_of(network) == []


@pytest.mark.slow
def test_a_network_that_can_be_exported_is_not_mentioned(tmp_path: Path) -> None:
    assert said_of(checked(tmp_path)) == []


@pytest.mark.thorough
def test_a_network_that_cannot_be_exported_is_reported_with_the_reason(tmp_path: Path) -> None:
    (note,) = said_of(checked(tmp_path, body=UNTRACEABLE))
    assert note.startswith("Note: the network of 'tried' cannot be exported to ONNX (")
    assert "torch will serve it" in note


def test_a_prepare_that_cannot_be_exported_is_reported(tmp_path: Path) -> None:
    (note,) = said_of(checked(tmp_path, prepared="return x[:3] * (1 if torch.unique(x).numel() > 2 else 2)"))
    assert note.startswith("Note: this run cannot end with a bundle: The prepare of application 'tried'")


def test_an_edit_of_the_sources_meanwhile_is_not_taken_for_the_network(tmp_path: Path) -> None:
    network = checked(tmp_path)
    (tmp_path / "app.py").write_text("raise SystemExit(3)\n")
    assert said_of(network) == []


def test_the_end_of_the_steps_ends_the_export_at_once(tmp_path: Path) -> None:
    network, said = checked(tmp_path), list[str]()
    with TrialExport(network, said.append, wait_s=0):
        time.sleep(0.5)
    began_s = time.monotonic()
    with TrialExport(network, said.append):
        pass
    assert time.monotonic() - began_s < 5
    assert said == []


@pytest.mark.parametrize("nothing", ["no network", "no file"])
def test_nothing_is_exported_without_a_network_that_another_process_can_find(nothing: str, tmp_path: Path) -> None:
    network = checked(tmp_path)
    given = None if nothing == "no network" else replace(network, found=replace(network.found, reference=""))
    with TrialExport(given, print, wait_s=0):
        assert not any(thread.name == "trial-export" for thread in threading.enumerate())


def test_the_written_bundle_has_the_tensors_of_the_network(tmp_path: Path) -> None:
    network = checked(tmp_path)
    bundle = network.write(tmp_path / "bundle", None)
    assert bundle.manifest.parameters == sum(p.numel() for p in nn.Linear(3, 2).parameters())
    assert {name: tensor.dtype for name, tensor in network.tensors.items()} == dict.fromkeys(
        ("layer.weight", "layer.bias"), torch.float32
    )
