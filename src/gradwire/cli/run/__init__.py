"""`gradwire run`: torchrun, with gradwire behind the program's names."""
