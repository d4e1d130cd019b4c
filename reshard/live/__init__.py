"""What a live state is: nested containers, tensors of every kind, and which elements they hold."""
