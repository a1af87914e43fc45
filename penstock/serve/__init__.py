"""Batch Dispatch: requests of many users batched under a latency budget."""

import os

if os.environ.get("PENSTOCK_INTERPRETED"):
    from penstock.serve.compiled import interpret_all

    interpret_all()
