"""Whatever a network is made of, its bundle gives the same network back; whatever happens to its bytes is seen."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.bundles.bundle import GOLDEN, MANIFEST, WEIGHTS, Manifest, read_bundle
from penstock.core.errors import BundleCorrupt, BundleError
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from tests.support.generated import examples
from tests.support.small import written

TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
]
NAMES = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
TENSORS = st.tuples(st.sampled_from(TORCH_DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans())


class Made(nn.Module):
    """Buffers of any kind; answers with as many numbers as its input has, in another type."""

    def __init__(self, tensors: dict[str, tuple[torch.dtype, list[int], bool]], output: torch.dtype, seed: int) -> None:
        super().__init__()
        self.output = output
        chance = torch.Generator().manual_seed(seed)
        for name, (dtype, shape, across) in tensors.items():
            tensor = (torch.rand(shape, generator=chance) * 100).to(dtype)
            self.register_buffer(f"a_{name}", tensor.permute([*reversed(range(len(shape)))]) if across else tensor)

    def forward(self, x_BF: Tensor) -> Tensor:
        return (x_BF.double().abs() % 2).to(self.output)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(NAMES, TENSORS, max_size=5),
    dtypes=st.tuples(*[st.sampled_from(sorted(PROTOCOL_DATATYPES))] * 2),
    rows=st.integers(1, 40),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
    name=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
)
def test_a_network_comes_back_exactly(
    tensors: Any, dtypes: tuple[str, str], rows: int, metrics: dict[str, float], name: str
) -> None:
    spec_in = TensorSpec(dtype=dtypes[0], shape=(3,), meaning="any \u2603 meaning", name="in")
    spec_out = TensorSpec(dtype=dtypes[1], shape=(3,), meaning="numbers", labels=("a", "\u00e9", ""), name="out")
    output = getattr(torch, dtypes[1])
    app = Application(name=name, input=spec_in, output=spec_out, model=lambda: Made(tensors, output, seed=1))
    inputs = np.random.default_rng(0).integers(0, 2, (rows, 3)).astype(dtypes[0])
    module = Made(tensors, output, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        made = Bundle.write(app, module, inputs, to=Path(folder, "b"), metrics=metrics)
        back = load(Path(folder, "b"), app=app)
        state = back.module.state_dict()
        assert state.keys() == module.state_dict().keys()
        for key, tensor in module.state_dict().items():
            assert state[key].dtype == tensor.dtype
            assert torch.equal(state[key], tensor)
        manifest = back.files.manifest
        assert manifest.content_hash == made.manifest.content_hash
        assert (manifest.name, manifest.input, manifest.output) == (name, spec_in, spec_out)
        assert (back.files.golden.inputs == inputs[:32]).all()
        assert (back.predict(inputs)[:32] == back.files.golden.outputs).all()
        for key, value in metrics.items():
            assert manifest.metrics[key] == value or not np.isfinite(value)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from([MANIFEST, WEIGHTS, GOLDEN]))
def test_no_change_of_bytes_goes_unseen(data: st.DataObject, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder, "b")).folder / name
        whole = file.read_bytes()
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, min(len(whole), start + 8)))
        altered = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
        file.write_bytes(altered)
        try:
            read_bundle(Path(folder, "b"))
        except BundleCorrupt:
            assert altered != whole
        else:
            assert altered == whole


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_manifest_with_any_field_changed_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    side = {"dtype": "uint8", "shape": [2], "meaning": "m", "units": "", "labels": [], "name": "x"}
    fields: dict[str, Any] = {"name": "n", "reference": "", "input": side, "output": side, "tolerance": 1.0}
    fields |= {"sources": {}, "files": {}, "metrics": {}, "versions": {}, "parameters": 1, "schema_version": 1}
    fields |= data.draw(st.dictionaries(st.sampled_from([*fields, "more"]), JSON, max_size=2))
    try:
        manifest = Manifest.from_json(json.loads(json.dumps(fields)))
    except BundleError:
        return
    assert isinstance(manifest.to_json(), dict)
