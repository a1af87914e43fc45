"""The scheduler in simulated time, beside other batching policies."""
