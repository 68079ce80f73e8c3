"""Prove a Program equal to the plain model and free of deadlock, or say what is wrong."""
