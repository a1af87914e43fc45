"""What everything else stands on: specs, applications, bundles, errors. NumPy only, never torch."""
