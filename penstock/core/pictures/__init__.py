"""Pictures: their size and their resizing, outputs that are places in them, and the index of a folder's pictures."""
