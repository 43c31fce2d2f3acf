"""Disk: states of the user's that rest in files, and updates that read and write them in pieces."""
