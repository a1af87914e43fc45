"""Applications with a finish: declared, recorded, loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, BundleError, GoldenMismatch, PackError
from penstock.core.finish import Finish
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.core.spec import TensorSpec
from penstock.export.pack_check import _agree  # pyright: ignore[reportPrivateUsage]
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import as_found, finished
from tests.support.peaks import PEAKS, Heat, Peaks, app, declared

THREE = TensorSpec(dtype="float32", shape=(3,), meaning="three numbers")


def pictures() -> np.ndarray:
    given = (np.random.default_rng(0).random((4, 6, 6)) * 0.6).astype(np.float32)
    given[0] = 0
    # All scores are equal.
    given[1] = 0.9
    return given


def found() -> FoundApplication:
    return find_application("tests.support.peaks:app")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Bundle.write(found(), Heat(), pictures(), to=tmp_path_factory.mktemp("peaks") / "bundle").folder


def test_the_network_is_trained_and_the_finish_is_served(bundle: Path) -> None:
    loaded = penstock.load(bundle)
    none, equal, *_ = loaded.predict(pictures())
    assert none["places"].shape == (0, 2)
    assert none["scores"].shape == (0,)
    assert equal["scores"].tolist() == pytest.approx([0.9] * PEAKS)
    assert loaded.files.golden.network is not None
    assert loaded.files.golden.network["heat"].shape == (4, 6, 6)


def test_equal_scores_that_swap_pass_and_a_real_difference_is_named(bundle: Path) -> None:
    golden = penstock.load(bundle).files.golden

    class Backwards(Peaks):
        def forward(self, heat: Any, offset: Any) -> Any:
            made = Peaks.forward(self, heat, offset)
            kept = [torch.arange(PEAKS)[: int(count)].flip(0) for count in made["peaks"]]
            order = torch.stack([torch.cat([rows, torch.arange(len(rows), PEAKS)]) for rows in kept])
            return {
                "places": made["places"].gather(1, order[..., None].expand(-1, -1, 2)),
                "scores": made["scores"].gather(1, order),
                "peaks": made["peaks"],
            }

    class Moved(Peaks):
        def forward(self, heat: Any, offset: Any) -> Any:
            made = Peaks.forward(self, heat, offset)
            return made | {"places": made["places"] + torch.tensor([0.0, 0, 0.5, 0])[:, None, None]}

    def check(finish: Any) -> float:
        from penstock.runtime.torch_executor import TorchExecutor

        other = declared(finish=replace(app.finish, module=finish)) if app.finish else app
        module = finished(as_found(other), Heat())
        return golden.check(TorchExecutor(module, app.input, app.output).predict)

    assert check(Backwards) == pytest.approx(0, abs=1e-6)
    with pytest.raises(GoldenMismatch, match=r"by 0\.5 where .* is allowed, most in 'places' of example 2"):
        check(Moved)


class Best(nn.Module):
    """The three largest heights of the first row, with their columns."""

    def forward(self, heat: Tensor) -> dict[str, Tensor]:
        height_B3, column_B3 = heat[:, 0].topk(3)
        return {"column": column_B3, "height": height_B3}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, picture: Tensor) -> Tensor:
        return picture * self.factor


def top_of(rows: int | Dim) -> Application:
    picture = TensorSpec(name="picture", dtype="float32", shape=(6, 6), meaning="heights")
    return Application(
        name="best",
        input=picture,
        outputs={
            "column": TensorSpec(dtype="int64", shape=(rows,), meaning="column of each of the three"),
            "height": TensorSpec(dtype="float32", shape=(rows,), meaning="height of each of the three"),
        },
        model=Wide,
        finish=Finish(module=Best, inputs={"heat": replace(picture, name="heat")}),
    )


@pytest.mark.parametrize("rows", [3, Dim("rows", max=3, min=3)], ids=["fixed", "set"])
def test_rows_of_a_fixed_number_are_a_set_where_they_have_a_dim(rows: int | Dim, tmp_path: Path) -> None:
    examples = np.random.default_rng(0).random((2, 6, 6), np.float32)
    # Equal heights, which another executor may give in another order.
    examples[0] = 0.5
    golden = Bundle.write(as_found(top_of(rows)), Wide(), examples, to=tmp_path / "bundle").files.golden
    swapped = golden.outputs.copy()
    swapped["column"][0] = swapped["column"][0, [1, 0, 2]]
    if isinstance(rows, Dim):
        assert golden.check(lambda _: swapped) == 0
        assert _agree(swapped, golden.outputs, golden.agreement) == 0
        return
    hint = (
        r"most in 'column' of example 0, element \[\d\]: .*[Tt]he outputs of its finish .* Dim\('rows', max=5, min=5\)"
        r".* If no rows swapped, "
    )
    with pytest.raises(GoldenMismatch, match=f"{hint}the application or a library changed"):
        golden.check(lambda _: swapped)
    with pytest.raises(PackError, match=f"{hint}look for branches"):
        _agree(swapped, golden.outputs, golden.agreement)


def test_rows_that_swap_in_a_batch_are_not_called_padding(tmp_path: Path) -> None:
    class Unlike(Best):
        def forward(self, heat: Tensor) -> dict[str, Tensor]:
            made = Best.forward(self, heat)
            return made if len(heat) > 1 else {name: each.flip(1) for name, each in made.items()}

    application = top_of(3)
    assert application.finish is not None
    other = replace(application, finish=replace(application.finish, module=Unlike))
    with pytest.raises(ApplicationError, match=r"for examples alone than in a batch: .* Dim\('rows', max=5, min=5\)"):
        Bundle.write(as_found(other), Wide(), np.full((2, 6, 6), 0.5, np.float32), to=tmp_path / "bundle")


def test_another_network_is_found_where_no_row_shows_it(bundle: Path) -> None:
    loaded = penstock.load(bundle)
    golden = replace(loaded.files.golden, inputs=loaded.files.golden.inputs[:1])
    assert golden.network is not None
    golden = replace(golden, outputs=golden.outputs[:1], network=golden.network[:1])
    # The scores stay below the threshold, so that both give an empty list.
    with pytest.raises(GoldenMismatch, match=r"before its finish differ .* by 0\.1 .* in 'heat' of example 0"):
        golden.check_network(lambda _: _raised(golden.network, 0.1))


def _raised(records: Any, by: float) -> Any:
    other = records.copy()
    other["heat"] += by
    return other


def test_a_bundle_of_another_finish_is_refused(bundle: Path) -> None:
    assert app.finish is not None
    other = declared(finish=replace(app.finish, threshold=0.7))
    with pytest.raises(BundleError, match="now declares another finish than the bundle was made with"):
        penstock.load(bundle, app=other)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"module": Peaks()}, "module=Peaks.* not the module itself"),
        ({"inputs": {}}, "inputs={}; they must be a dictionary"),
        ({"threshold": 0.5, "score": ""}, "a threshold is a number, and needs the name"),
    ],
)
def test_a_wrong_finish_is_refused(changes: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"module": Peaks, "inputs": {"heat": THREE}}
    with pytest.raises(ApplicationError, match=problem):
        Finish(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"score": "best"}, "score='best', which is no output"),
        ({"score": "places"}, r"score='places', which is float32\[peaks<=5, 2\].* a Dim that no input has: TensorSpec"),
        ({"inputs": {"scores": THREE}}, "a tensor or dimension has name 'scores'; give each a name of its own"),
        ({"inputs": {"heat": replace(THREE, shape=(Dim("peaks", 9),))}}, "Dim 'peaks' is declared as"),
    ],
)
def test_a_finish_that_does_not_fit_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert app.finish is not None
    with pytest.raises(ApplicationError, match=problem):
        declared(finish=replace(app.finish, **changes))


def test_a_finish_with_weights_is_refused() -> None:
    assert app.finish is not None
    learned = declared(finish=replace(app.finish, module=Heat))
    with pytest.raises(ApplicationError, match=r"finish of application 'peaks' has 'layer\.weight' in its state"):
        finished(as_found(learned), Heat())
