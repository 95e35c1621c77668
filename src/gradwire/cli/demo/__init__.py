"""`gradwire demo`: train a small network on real data and compare with one process and with torch.

Each rank runs `rank`, which uses `options` and `train`. These modules do not print. `view` shows
messages and results, and `command` connects all of them.
"""
