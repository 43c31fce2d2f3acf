"""Answer: all strategies for a model on a cluster, judged and ranked."""
