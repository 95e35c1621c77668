"""The public collectives, and the plans that they make."""
