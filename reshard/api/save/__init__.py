"""`save` and `async_save`."""
