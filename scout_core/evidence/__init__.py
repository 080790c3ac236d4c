"""The edges that observe a training process: tensors, collectives, shared memory, clocks."""
