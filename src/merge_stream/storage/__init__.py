"""Reading and writing at an offset, on any storage."""
