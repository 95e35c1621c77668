"""How collectives are differentiated: the rules of every plan, handles, results without a copy."""
