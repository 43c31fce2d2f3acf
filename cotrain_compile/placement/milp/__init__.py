"""MILP: the integer program over the decisions, its relaxation as a bound, and its solvers."""
