"""Model families: from the trainer's names to the names of the Hugging Face repository, one file each."""
