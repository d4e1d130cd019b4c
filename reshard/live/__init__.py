"""What a live state is: nested containers, tensors of every kind, and where their elements lie."""
