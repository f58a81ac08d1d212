"""KV events in the wire form of vLLM and SGLang: told to others about our nodes, and heard of engines by our index."""
