"""What obeys plans: reading, sharing and exchanging bytes."""
