"""Static cost of a Program: memory, traffic and time on a described cluster."""
