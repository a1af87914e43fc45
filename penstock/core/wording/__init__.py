"""Words for sentences: counts, values of strangers, faults of JSON."""
