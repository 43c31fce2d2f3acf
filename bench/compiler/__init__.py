"""What does compiling cost? Seconds, memory and growth, beside stock torch.compile."""
