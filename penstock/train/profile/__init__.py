"""Step-time breakdown: profiler, kernel traces, timeline."""
