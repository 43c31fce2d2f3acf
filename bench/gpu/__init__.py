"""What is to be run on a card, and what can be known without one."""
