"""Actors with bounded mailboxes, supervision and an authenticated ZeroMQ bus."""
