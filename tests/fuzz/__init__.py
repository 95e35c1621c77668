"""Random models under gradwire's class, PyTorch's and a naive average, held against each other.

    python tests/fuzz --models 1000 --backends gloo shm     # many, from seed 0
    python tests/fuzz --seed 4711 --backends shm            # one, shrunk if it fails

`plan` makes a case from a seed and `source` the model's code, `train` runs it on a rank,
`run` runs many and compares, `shrink` makes a failing case small.
"""
