"""Drawn models and programs, held against references; `kinds` lists the kinds of cases."""
