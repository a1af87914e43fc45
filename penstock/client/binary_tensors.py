"""Binary tensors of the Open Inference Protocol over HTTP: a request's body, and the arrays of a response."""

from collections.abc import Mapping
from math import prod

import numpy as np
import orjson

from penstock.core.spec import PROTOCOL_DATATYPES, Array

HEAD_LENGTH = "Inference-Header-Content-Length"


def request_body(arrays: Mapping[str, Array]) -> tuple[bytes, int]:
    """Make the body of an inference request, version 2, with binary tensors both ways.

    Returns:
        The body, and the length of its JSON head.
    """
    parts = [array.tobytes() for array in arrays.values()]
    inputs = [
        {
            "name": name,
            "datatype": PROTOCOL_DATATYPES[array.dtype.name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(part)},
        }
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return b"".join([head, *parts]), len(head)


def tensors_of(head: bytes, tail: bytes) -> dict[str, Array]:
    """Read the binary tensors of a response by name.

    Args:
        head: The JSON head.
        tail: The bytes that follow it.

    Raises:
        ValueError: They do not belong together.
    """
    dtypes = {datatype: dtype for dtype, datatype in PROTOCOL_DATATYPES.items()}
    arrays: dict[str, Array] = {}
    at = 0
    try:
        for tensor in orjson.loads(head)["outputs"]:
            dtype = np.dtype(dtypes[tensor["datatype"]]).newbyteorder("<")
            shape, size = tensor["shape"], tensor["parameters"]["binary_data_size"]
            if prod(shape) * dtype.itemsize != size or size > len(tail) - at or min(shape, default=0) < 0:
                raise ValueError(f"{tensor['name']!r} has {size} bytes for {shape}")
            arrays[tensor["name"]] = np.frombuffer(tail, dtype, prod(shape), at).reshape(shape)
            at += size
    except (KeyError, TypeError) as error:
        raise ValueError(f"the head of an inference is {head[:80]!r} ({error})") from None
    if at != len(tail):
        raise ValueError(f"{len(tail):,} bytes follow the head of an inference, which has {at:,}")
    return arrays
