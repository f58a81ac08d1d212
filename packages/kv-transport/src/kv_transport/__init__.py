"""One-sided, checked transfers of KV blocks over shared memory, TCP and UCX."""
