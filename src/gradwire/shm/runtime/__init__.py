"""Limits, waits, handles and the queue of operations."""
