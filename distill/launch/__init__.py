"""Processes: what each role is started with, how they are started, watched and ended."""
