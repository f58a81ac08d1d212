"""Sequences that no single node can hold: how they are cut, and what the nodes that hold them say to each other.

`plan` cuts, `messages` is the schema. The gateway plans (`gateway.oversize`), one node coordinates
(`node.shard_coordinator`), every node that holds a piece works on it (`node.shard_worker`).
"""
