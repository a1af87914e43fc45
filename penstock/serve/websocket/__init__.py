"""WebSocket (RFC 6455): frames, the upgrade from HTTP, one connection per live stream. No torch."""
