"""`gradwire doctor`: what works on this machine, tried, and what will bite."""
