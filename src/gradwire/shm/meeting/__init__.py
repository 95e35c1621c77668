"""Rendezvous of the ranks, their connections and regions, and the barriers with headers."""
