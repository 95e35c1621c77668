"""Gradient buckets: assignment of parameters, copies in and out, ownership of memory."""
