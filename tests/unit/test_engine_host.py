"""What engines of one device share."""

import pytest

from penstock.serve.engine_host import engines_on


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (("cpu", "cpu"), [2, 2]),
        (("cuda:0", "cuda:1"), [1, 1]),
        (("cuda", "cuda:0", "cuda:1"), [2, 2, 1]),
        (("auto",), [1]),
    ],
)
def test_engines_share_the_device_that_they_are_on_whatever_it_is_called(
    devices: tuple[str, ...], shared: list[int]
) -> None:
    assert [engines_on(device, devices) for device in devices] == shared
