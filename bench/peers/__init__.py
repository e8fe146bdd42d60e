"""What a user would run instead: other tools on the same checkpoint, interleaved and cold.

`race` builds an environment for each, runs and compares; each other module is one tool, with the
checkpoints that it reads.
"""
