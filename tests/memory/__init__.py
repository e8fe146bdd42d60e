"""Peak memory of fresh processes."""
