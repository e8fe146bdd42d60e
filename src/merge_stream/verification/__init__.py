"""Proving that a model is what it should be, streamed."""
