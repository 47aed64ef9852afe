"""Decides who may leave, what is there and whose a slot is.  No I/O, threads, clock or torch."""
