"""Everything that crosses a process boundary; each folder imports only those below it.

    vllm       what runs inside a replica
    weights    publish versions of a model to a store, and follow them
    wire       messages, and how they are sent and checked
    base       files, settings, secrets, errors

Weights can be published and followed without the rest: docs/weight-sync.md shows it in ten lines.
"""
