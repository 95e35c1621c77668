"""What happens when a rank fails, stays behind or dies: one fault domain per process group."""
