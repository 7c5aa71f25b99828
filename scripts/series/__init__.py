"""Fetch, apply, gate, check and edit the patch series under `patches/`."""
