"""What is said of many machines: the one answer for models on clusters."""
