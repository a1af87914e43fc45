"""Engines that share a device."""

import pytest

from penstock.serve.engine.model_loader import engines_on


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (("cpu", "cpu"), [2, 2]),
        (("cuda:0", "cuda:1"), [1, 1]),
        (("cuda", "cuda:0", "cuda:1"), [2, 2, 1]),
        (("auto",), [1]),
    ],
)
def test_engines_on_one_device_are_counted_under_all_of_its_names(devices: tuple[str, ...], shared: list[int]) -> None:
    assert [engines_on(device, devices) for device in devices] == shared
