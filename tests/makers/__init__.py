"""Makers: small real checkpoints, written by the trainers' own calls, with the truth beside them."""
