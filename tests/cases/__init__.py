"""The numbered cases of how such tools hurt people."""
