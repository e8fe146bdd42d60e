"""Tests of merge-stream."""
