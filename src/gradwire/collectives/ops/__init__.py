"""Public collectives, and the plans that they make."""
