"""`distill bench sync`: the codec, roads through every store, swaps of a live engine, a whole run."""
