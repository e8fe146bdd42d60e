"""A synthetic sharded checkpoint, a merge of it, and the floor of the disk: `merge-stream bench`.

Loaded by that command alone. `synthetic` makes checkpoints with torch's own DTensors and is the only part of the
package that knows of `torch.distributed`; `shapes` and `values` say what is in them; `run` measures, with `children`;
`baseline` compares with an earlier run.
"""
