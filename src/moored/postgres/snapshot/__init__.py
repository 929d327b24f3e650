"""Copies of tables, in chunks, and the stream of changes that continues them."""
