"""The services of the KV fabric: gateway, nodes, monitor and the command line."""
