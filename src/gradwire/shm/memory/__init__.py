"""Shared memory: segments, headers, semaphores, copies, and checks of callers' tensors."""
