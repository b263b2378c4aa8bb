"""The evaluator: exact reverse KL and pass rate of any version on held-out prompts."""
