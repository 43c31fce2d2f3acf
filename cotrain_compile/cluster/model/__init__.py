"""Model: a cluster, a model as layers, and the answer, as plain data that every room reads."""
