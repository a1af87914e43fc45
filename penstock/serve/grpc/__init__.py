"""The Open Inference Protocol over gRPC, in a thread and event loop of its own. No torch."""
