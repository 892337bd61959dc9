"""What int8 activations cost a model, measured when it is loaded: `activations` chooses by it, `saved` keeps it."""
