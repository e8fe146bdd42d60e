"""Staging in a zarr store."""
