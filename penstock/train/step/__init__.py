"""One training step: CUDA graph, optimizer step, master weights, loss scale, schedules, seeds."""
