"""The reducer: the state machine of a backward, launching buckets, which parameters were used."""
