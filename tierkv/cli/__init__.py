"""The command line: what is in a store directory, is it sound, and a demonstration.

One file a command.  No command but ``demo`` imports torch.
"""
