"""Model families as Megatron names them, one file each: from its canonical names to those of the repository."""
