"""What obeys plans: reading, writing and exchanging bytes."""
