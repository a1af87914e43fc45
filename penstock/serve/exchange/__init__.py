"""Requests, responses, access and budgets, as records that every transport shares. No sockets, no torch."""
