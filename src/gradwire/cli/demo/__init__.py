"""`gradwire demo`: train a small network on real data, and compare with one process and with torch.

`options`, `data`, `model` and `wrap` are what it is made of; `train` and `timing` run on each rank,
together in `rank`. These print nothing: `view` and `report` show the messages and the result, and
`command` connects them.
"""
