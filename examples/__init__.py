"""Layers on several ranks, each a few lines over gradwire's collectives."""
