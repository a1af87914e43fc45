"""The request load generator: open and closed loop, every answer checked."""
