"""The reducer: the state of a backward pass, the launch of buckets, the parameters in use."""
