"""Operators of our own: schema, fake, autograd and kernels, one family a file."""
