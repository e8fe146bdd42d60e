"""Moving the bytes of a plan within the memory bound; knows nothing of formats."""
