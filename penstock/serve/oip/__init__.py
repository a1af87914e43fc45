"""The Open Inference Protocol, version 2, independent of its transport: inference requests and metadata. No torch."""
