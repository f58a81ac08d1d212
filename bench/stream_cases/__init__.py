"""What `bench/streams.py` measures with, by side: our cluster, and vllm-router before workers that compute nothing."""
