"""The command line of the KV fabric."""

from kv_services.kvctl.app import app

__all__ = ["app"]
