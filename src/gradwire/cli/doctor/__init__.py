"""`gradwire doctor`: trials of the backends and checks of this machine."""
