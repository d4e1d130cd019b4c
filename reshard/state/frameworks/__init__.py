"""What frameworks make of tensors: placements, flat and partitioned parameters, subclasses, wrappers and names."""
