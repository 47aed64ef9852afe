"""Pools that another engine owns: its page keys in, its block ids out and in."""
