"""The pages and figures that are made from `bench/results`."""
