"""Tensors without data: regions, element types, and where the bytes of a tensor lie."""
