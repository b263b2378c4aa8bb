"""A backend of Triton 3.9 for CPUs that compiles nothing: with TRITON_INTERPRET=1 no kernel is compiled."""
