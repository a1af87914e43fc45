"""Live streams independent of their protocol: sessions, slots held over many chunks, sequences. No torch."""
