"""Elastic training: what a step costs without failures, and how long a killed member costs."""
