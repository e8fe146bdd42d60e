"""File containers: where the bytes of stored tensors lie, and plain data out of pickles that run nothing."""
