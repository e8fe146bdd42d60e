"""The Hugging Face folder around the weights: config, side files, index, commit."""
