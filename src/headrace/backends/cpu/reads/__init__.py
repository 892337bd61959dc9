"""The part of a recorded forward pass that is computed for the rows alone that are read after the step."""
