"""The engine: what computes KV and logits on paged blocks.

Node roles know `interface` alone. `llama` is the exact reference engine, `stub` the cheap one with checkable bytes;
`load.open_engine` gives either with its tokeniser.
"""
