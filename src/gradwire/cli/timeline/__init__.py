"""`gradwire timeline`: a trace in numbers, as a page and as a picture."""
