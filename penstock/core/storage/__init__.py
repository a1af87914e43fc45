"""Files and folders, here and at URLs: written whole, read within bounds, verified."""
