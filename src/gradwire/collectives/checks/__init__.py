"""Ranks compare their calls before data is sent."""
