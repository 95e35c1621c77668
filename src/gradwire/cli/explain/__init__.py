"""`gradwire explain`: the verdict on a directory of dumps."""
