"""The slower tiers below a node's memory: a disk folder, and an object store.

`catalog`, `spill`, `cost` and `manifest` decide and are pure; `disk` and `remote` do IO and run off the loop.
"""
