"""AutoTM: the program of Hildebrand et al. (ASPLOS 2020), a reference for small steps."""
