"""What a training step can take at best: models' layers, and how long their gradients keep the links busy. Pure."""
