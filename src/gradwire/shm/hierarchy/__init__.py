"""Groups over several hosts: shared memory within each, an engine such as Gloo between them."""
