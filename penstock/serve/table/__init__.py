"""The slot table: columns with one writer each, in shared or private memory, and the measured batch costs. No torch."""
