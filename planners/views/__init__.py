"""Tensors put together from parts of other tensors, and layouts and plans seen through them."""
