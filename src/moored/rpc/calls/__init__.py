"""Calls over a handler: the four kinds of methods, pending calls, retries, and unsent calls."""
