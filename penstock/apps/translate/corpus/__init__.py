"""The parallel text that the network learns, made from Debian packages."""
