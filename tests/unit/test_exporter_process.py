"""Why an export failed, in one line."""

import pytest

from penstock.runtime.onnx.exporter_process import first_cause

# As torch's exporter writes it.
TRACED = """Cannot view a tensor with shape (1, 5)!

While executing %view : [num_users=1] = call_function[target=torch.ops.aten.view.default](args = (%mul, [5]))
Original traceback:
File "/penstock/runtime/named_network.py", line 82, in forward
    found = self._call(given)
  File "/home/anna/tank.py", line 24, in forward
    seen = seen.view(-1)
Use tlparse to see full graph."""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (TRACED, "ValueError: Cannot view a tensor with shape (1, 5)! at /home/anna/tank.py:24"),
        ("no such\noperation", "ValueError: no such"),
        ("", "ValueError: "),
    ],
)
def test_the_innermost_cause_and_its_line_are_named(message: str, says: str) -> None:
    outer = RuntimeError("Failed to export the model. Create an issue")
    outer.__cause__ = ValueError(message)
    assert first_cause(outer) == says
