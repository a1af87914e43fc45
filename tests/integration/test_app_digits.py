"""The digits application: what it decodes, replies and prepares, and that it learns."""

import io
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.apps.digits.app import app, decode, reply
from penstock.apps.digits.model import DigitNormalizer, DigitsNet
from penstock.apps.digits.recipe import augment, digits
from penstock.core.source_files.find_application import find_application
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.run import train

RNG = np.random.default_rng(0)


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def strokes(row: int = 6, column: int = 8) -> torch.Tensor:
    picture = torch.zeros(1, 28, 28, dtype=torch.uint8)
    picture[0, row, column : column + 10] = 255
    picture[0, row : row + 14, column + 5] = 255
    return picture


def test_pictures_of_any_size_become_what_the_sensor_sees() -> None:
    pixels = RNG.integers(0, 256, (28, 28), dtype=np.uint8)
    np.testing.assert_array_equal(decode(png(pixels), "image/png"), pixels)
    large = np.kron(pixels, np.ones((10, 10), np.uint8))
    np.testing.assert_array_equal(decode(png(large), "image/png"), pixels)


def test_the_reply_names_the_digit() -> None:
    answer = reply(np.eye(10, dtype=np.float32)[7])
    assert (answer["digit"], answer["probability"], answer["probabilities"]["7"]) == ("7", 1.0, 1.0)


def test_preparation_is_finite_for_empty_full_and_single_pixels() -> None:
    dot = torch.zeros(1, 28, 28, dtype=torch.uint8)
    dot[0, 0, 27] = 255
    odd = torch.cat([torch.zeros(1, 28, 28), torch.full((1, 28, 28), 255), dot]).to(torch.uint8)
    prepared = DigitNormalizer()(odd)
    assert prepared.shape == (3, 1, 16, 16)
    assert torch.isfinite(prepared).all()
    assert torch.isfinite(DigitsNet().eval().predict(odd)).all()


def test_preparation_does_not_care_for_place_or_polarity() -> None:
    prepare = DigitNormalizer()
    here, there = prepare(strokes()), prepare(strokes(row=9, column=12))
    assert (here - there).abs().max() < 0.02
    assert (here - prepare(255 - strokes())).abs().max() < 1e-5


def arrays(part: Examples | None) -> ArraySet:
    assert isinstance(part, ArraySet)
    return part


def test_augmentation_is_a_function_of_its_generator_and_stays_in_range() -> None:
    pixels = torch.from_numpy(arrays(digits().train).inputs[:50])
    labels = torch.zeros(50)
    one, other, third = (augment(pixels, labels, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)
    assert one.min() >= 0
    assert one.max() <= 255


def test_batches_are_augmented_where_they_are() -> None:
    # "meta" stands for a GPU: it refuses what is on another device as well.
    pixels, labels = torch.zeros(5, 28, 28, dtype=torch.uint8, device="meta"), torch.zeros(5, device="meta")
    changed, same = augment(pixels, labels, torch.Generator().manual_seed(1))
    assert changed.is_meta
    assert changed.shape == pixels.shape
    assert same is labels


def test_the_held_out_third_is_never_learned_from_or_chosen_by() -> None:
    data = digits()
    train, validation, test = arrays(data.train), arrays(data.validation), arrays(data.test)
    seen = {image.tobytes() for part in (train, validation) for image in part.inputs}
    assert len(test) == 599
    assert len(train) + len(validation) + len(test) == 1797
    assert sum(image.tobytes() in seen for image in test.inputs) == 0
    counts = np.bincount(test.targets)
    assert counts.max() - counts.min() <= 4


@pytest.mark.thorough
def test_eight_epochs_read_most_digits_already(tmp_path: Path) -> None:
    found = find_application("digits")
    result = train(found, tmp_path / "run", replace(found.recipe(), epochs=8), overrides={}, quiet=True)
    assert result.metrics["test_accuracy"] > 0.95


def test_the_network_is_as_large_as_it_says() -> None:
    parameters = sum(parameter.numel() for parameter in DigitsNet().parameters())
    assert 60_000 < parameters < 120_000
    assert app.max_body_bytes == 1 << 20


SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "confusion.py"


def test_confusion_matrices_are_drawn_beside_one_another(tmp_path: Path) -> None:
    matrix_KK = RNG.integers(0, 60, (10, 10))
    picture = runpy.run_path(str(SCRIPT))["draw"](
        {0.1: matrix_KK, 1.0: matrix_KK.T}, tmp_path / "docs" / "confusion.png"
    )
    with Image.open(picture) as drawn:
        assert drawn.width > 1.8 * drawn.height


@pytest.mark.slow
def test_the_confusion_of_a_training_is_counted() -> None:
    matrix_KK = runpy.run_path(str(SCRIPT))["confusion_of"](0.1)
    test = digits().test
    assert isinstance(test, ArraySet)
    # A row for each true digit.
    np.testing.assert_array_equal(matrix_KK.sum(1), np.bincount(np.asarray(test.targets)))
