"""Benches: a generator of synthetic checkpoints, the contenders, and the scripts that compare them."""
