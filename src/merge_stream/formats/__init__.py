"""Trainer formats: one file for each on-disk convention."""
