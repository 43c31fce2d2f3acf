"""Runtime: what carries out the tasks of a placed graph: lanes, host updates, memory meters."""
