"""`gradwire demo`: train a small network on real data, and compare with one process and with torch.

`options` says what to do, `data`, `model` and `wrap` what with; `train` and `timing` do it on one
rank, `devices` on the replicas of one process. These know nothing of terminals; `view` and `report`
show what they find, and `command` ties them together.
"""
