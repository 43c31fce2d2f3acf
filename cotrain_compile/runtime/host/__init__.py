"""Host: the kernels that update parameters on the host."""
