"""Checksums that checkpoints hold, and those of the files that are written."""
