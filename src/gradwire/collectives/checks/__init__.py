"""Consistency checks: ranks compare their calls before any data is sent."""
