"""Bundles and packs at URLs: the cache of downloads, uploads, and pushes to a hub."""
