"""Roles: which tensor of the graph is which parameter, state, gradient or batch of the user's."""
