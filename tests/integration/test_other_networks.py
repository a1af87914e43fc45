"""Networks of other libraries as they come: declared, started from their weights, trained, served, exported."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.core.bundles.bundle import read_bundle
from penstock.core.packs.pack import read_pack
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine
from tests.support.serving import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 2, 9, 24)
# The name in transformers, the configuration, and the tensors that only its pretraining or only a classifier has.
NETWORKS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "bert": (
        "Bert",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
        "ForMaskedLM",
        ("cls.*", "bert.pooler.*", "classifier.*"),
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
        "ForMaskedLM",
        ("vocab_*", "pre_classifier.*", "classifier.*"),
    ),
    "roberta": (
        "Roberta",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
        "ForMaskedLM",
        ("lm_head.*", "classifier.*"),
    ),
}

APPLICATION = """
import numpy as np

from penstock import Application, Dim, Initial, Recipe, TensorSpec

TOKENS = Dim("tokens", max=24)


def network():
    from transformers import {name}Config, {name}ForSequenceClassification

    config = {name}Config(vocab_size=60, max_position_embeddings=40, num_labels=3, **{config})
    return {name}ForSequenceClassification(config)


def recipe():
    import torch
    from torch.nn.functional import cross_entropy

    from penstock.train.recipe import ArraySet, Data

    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 60, rng.integers(1, 25)) for _ in range(64)]
    held = ArraySet(
        inputs={{"input_ids": ids, "attention_mask": [np.ones(len(row), np.int64) for row in ids]}},
        targets=np.array([row[0] % 3 for row in ids]),
    )
    return Recipe(
        data=lambda: Data(train=held, validation=held),
        loss=lambda outputs, targets: cross_entropy(outputs["logits"], targets),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=16,
        steps=4,
    )


app = Application(
    name="mood",
    inputs={{
        "input_ids": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, 59)),
        "attention_mask": TensorSpec(dtype="int64", shape=(TOKENS,), meaning="1 for a token", limits=(0, 1)),
    }},
    output=TensorSpec(
        name="logits", dtype="float32", shape=(3,), meaning="score of each mood", labels=("bad", "so so", "good")
    ),
    model=network,
    recipe=recipe,
    initial=Initial("pretrained", skip={skip}),
)
"""


def penstock_run(folder: Path, *arguments: str, more: Mapping[str, str] | None = None) -> str:
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"} | dict(more or {}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(tokens: int) -> dict[str, Array]:
    ids = np.random.default_rng(tokens).integers(3, 60, tokens)
    return {"input_ids": ids, "attention_mask": np.ones(tokens, np.int64)}


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short training of one of the classifiers, from the weights of a pretraining."""
    transformers: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    name, config, kind, skip = NETWORKS[request.param]
    made = getattr(transformers, f"{name}Config")(vocab_size=60, max_position_embeddings=40, **config)
    getattr(transformers, f"{name}{kind}")(made).save_pretrained(folder / "pretrained")
    (folder / "app.py").write_text(APPLICATION.format(name=name, config=config, skip=skip))
    penstock_run(folder, "train", "app.py", "--out", "run")
    return folder


def test_a_classifier_of_transformers_is_trained_served_and_exported(trained: Path) -> None:
    bundle = trained / "run" / "bundle"
    manifest = read_bundle(bundle).manifest
    assert manifest.initial is not None
    assert manifest.initial.source == "pretrained"
    # Neither loading nor serving needs the weights that it started from.
    (trained / "pretrained" / "model.safetensors").unlink()
    predictor = penstock.load(bundle)
    expected = predictor.predict([example(tokens) for tokens in LENGTHS])
    alone = [predictor.predict(example(tokens)) for tokens in LENGTHS]
    np.testing.assert_allclose(expected, alone, atol=1e-5)
    with RunningServer(bundle) as server:
        for tokens, logits in zip(LENGTHS, expected, strict=True):
            body = json.dumps({name: array.tolist() for name, array in example(tokens).items()}).encode()
            status, _, reply = server.ask("POST", "/v1/apps/mood", body, {"Content-Type": "application/json"})
            assert status == 200, reply
            np.testing.assert_allclose(reply, logits, atol=1e-4)
    penstock_run(trained, "export", "run/bundle", "--out", "pack")
    engine = PackEngine(read_pack(trained / "pack"))
    for tokens, logits in zip(LENGTHS, expected, strict=True):
        np.testing.assert_allclose(engine.predict(example(tokens))["logits"], logits, atol=1e-4)


BACKBONE = """
import numpy as np

from penstock import Application, Initial, Recipe, TensorSpec


def network():
{network}


def recipe():
    import torch
    from torch.nn.functional import cross_entropy

    from penstock.train.recipe import ArraySet, Data

    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(24, 3, 32, 32)).astype(np.float32)
    held = ArraySet(inputs=pictures, targets=(pictures.mean((1, 2, 3)) > 0).astype(np.int64))
    return Recipe(
        data=lambda: Data(train=held, validation=held),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch_size=8,
        steps=3,
    )


app = Application(
    name="kinds",
    input=TensorSpec(dtype="float32", shape=(3, 32, 32), meaning="a normalised picture", name="picture"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="score", labels=("dark", "light"), name="scores"),
    model=network,
    recipe=recipe,
    initial=Initial("{source}", skip=("fc.*",)),
)
"""
# The package, and what makes its network of two classes.
BACKBONES = {
    "timm": "    import timm\n\n    return timm.create_model('resnet18', num_classes=2)",
    "torchvision": "    from torchvision.models import resnet18\n\n    return resnet18(num_classes=2)",
}


def put_into_cache(library: str, folder: Path) -> None:
    """Put random weights where the library keeps those that it has downloaded, so that it needs no connection."""
    torch.manual_seed(0)
    if library == "timm":
        import timm  # pyright: ignore[reportMissingImports]

        made: Any = timm.create_model("resnet18")  # pyright: ignore
        name = f"models--{made.default_cfg['hf_hub_id'].replace('/', '--')}"
        snapshot = folder / "hub" / name / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (folder / "hub" / name / "refs").mkdir()
        (folder / "hub" / name / "refs" / "main").write_text("0" * 40)
        save_file(made.state_dict(), snapshot / "model.safetensors")
    else:
        from torchvision import models  # pyright: ignore[reportMissingImports]

        library_models: Any = models  # pyright: ignore
        url = library_models.get_model_weights("resnet18").DEFAULT.url
        checkpoints = folder / "hub" / "checkpoints"
        checkpoints.mkdir(parents=True)
        torch.save(library_models.resnet18().state_dict(), checkpoints / url.rpartition("/")[2])


@pytest.mark.parametrize("library", BACKBONES)
def test_a_backbone_starts_from_the_weights_that_its_library_looks_up(library: str, tmp_path: Path) -> None:
    # timm imports torchvision.
    for package in {"torchvision", library}:
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    put_into_cache(library, tmp_path / "cache")
    source = f"{library}:resnet18"
    (tmp_path / "app.py").write_text(BACKBONE.format(network=BACKBONES[library], source=source))
    cache = str(tmp_path / "cache")
    penstock_run(tmp_path, "train", "app.py", "--out", "run", more={"HF_HOME": cache, "TORCH_HOME": cache})
    bundle = tmp_path / "run" / "bundle"
    started = read_bundle(bundle).manifest.initial
    assert started is not None
    assert started.source == source
    picture = np.random.default_rng(1).normal(size=(3, 32, 32)).astype(np.float32)
    expected = penstock.load(bundle).predict(picture)
    with RunningServer(bundle) as server:
        kind = {"Content-Type": "application/octet-stream"}
        status, _, reply = server.ask("POST", "/v1/apps/kinds", picture.tobytes(), kind)
        assert status == 200, reply
        np.testing.assert_allclose(reply, expected, atol=1e-4)
    penstock_run(tmp_path, "export", "run/bundle", "--out", "pack")
    np.testing.assert_allclose(
        PackEngine(read_pack(tmp_path / "pack")).predict({"picture": picture})["scores"], expected, atol=1e-3
    )
