"""Probabilities that can be believed: the temperature, and how far they are from what happens."""

import pytest
import torch
from torch import Tensor

from penstock.models.calibrated import Calibrated
from penstock.models.mobile import MobileNet
from penstock.train.calibration import calibration_error, negative_log_likelihood, reliability, temperature_of


def drawn(count: int = 5_000, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Logits, and labels that come as often as those say."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, classes, generator=generator)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("wrong", [0.5, 1.0, 3.0])
def test_the_temperature_undoes_what_logits_are_too_large_by(wrong: float) -> None:
    logits, labels = drawn()
    found = temperature_of(logits * wrong, labels)
    assert found == pytest.approx(wrong, rel=0.06)
    there = negative_log_likelihood(logits * wrong, labels, found)
    for other in (found * 0.97, found * 1.03):
        assert there < negative_log_likelihood(logits * wrong, labels, other)


def test_few_examples_that_are_all_right_do_not_make_it_sure_of_everything() -> None:
    logits = torch.eye(4) * 5
    # Right with 5/6: exp(5 / T) / (exp(5 / T) + 3).
    assert (logits / temperature_of(logits, torch.arange(4))).softmax(1)[0, 0].item() == pytest.approx(5 / 6, abs=1e-6)
    # And where all are wrong, of nothing.
    assert temperature_of(logits, torch.arange(4).roll(1)) == pytest.approx(20, rel=1e-3)


def test_the_calibration_error_is_how_far_confidence_is_off() -> None:
    logits, labels = drawn()
    assert calibration_error(logits.softmax(1), labels) < 0.03
    assert calibration_error((3 * logits).softmax(1), labels) > 0.1
    # All said with 0.8, half of it right.
    chances = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
    halves = torch.tensor([0, 1] * 5)
    assert calibration_error(chances, halves) == pytest.approx(0.3, abs=1e-6)
    assert reliability(chances, halves) == [(10, pytest.approx(0.8), 0.5)]


def test_the_temperature_is_of_the_probabilities_alone() -> None:
    torch.manual_seed(0)
    inside = MobileNet(3, width=0.25)
    network = Calibrated(inside).eval()
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    with torch.inference_mode():
        logits, features = network(pixels), network.embed(pixels)
        network.load_state_dict(network.state_dict() | {"temperature": torch.tensor(2.0)})
        torch.testing.assert_close(network.predict(pixels), (logits / 2).softmax(1))
        assert torch.equal(network(pixels), logits)
        assert features.shape == (2, 256)
        torch.testing.assert_close(inside.fc(features), logits)
        # As prepared pictures come: not whole numbers of bytes.
        torch.testing.assert_close(network(pixels.float()), logits)
