"""The front-end side: chunks into slots and results out, admission, load balancing over engines. No torch."""
