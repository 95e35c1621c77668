"""Fault handling when a rank fails, falls behind or dies: one fault domain per process group."""
