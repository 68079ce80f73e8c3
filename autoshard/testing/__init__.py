"""For pass authors: lock step, reference programs, tiny models."""
