"""Algorithms of collectives between ranks that all share memory."""
