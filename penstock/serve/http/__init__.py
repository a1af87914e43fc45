"""HTTP/1.1: parser, connections, listener, routes, and the plain and Open Inference Protocol bodies. No torch."""
