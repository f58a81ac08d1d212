"""`kvctl replay` and `kvctl workload`: what a cache of some size would have done with a trace of requests."""
