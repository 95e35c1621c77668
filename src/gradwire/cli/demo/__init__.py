"""`gradwire demo`: train a small network on real data and compare with one process and with torch.

Each rank runs `rank`, which uses `train`, `timing`, `options`, `task` and `wrap`. These modules do
not print. `view` shows messages, `report` shows the result, and `command` connects all of them.
"""
