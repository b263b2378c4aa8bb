"""The controller: prompts out, scored rollouts in, batches to the trainer; journaled, bounded, no torch."""
