"""Batch Dispatch: requests of many users batched under a latency budget."""

from penstock.serve.compiled import interpret_all, interpreter_wanted

# Before any of the modules that it concerns is imported, whichever comes first.
if interpreter_wanted():
    interpret_all()
