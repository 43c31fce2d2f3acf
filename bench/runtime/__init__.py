"""What does running a step cost? Updates on the host, tasks, overlap."""
