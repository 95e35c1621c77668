"""Autograd of collectives: rules that all plans share, handles, and unstacking without a copy."""
