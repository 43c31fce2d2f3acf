"""Data parallel: replicas, and shards of parameters, gradients and states."""
