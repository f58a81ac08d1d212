"""The gateway: HTTP in front, routing behind."""
