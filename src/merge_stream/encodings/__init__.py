"""Output encodings: in which element type a parameter is written, one file each."""
