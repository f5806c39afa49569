"""The algorithm as pure functions: tensors in, tensors out; rewards: text in, numbers out."""
