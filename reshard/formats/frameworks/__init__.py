"""What training frameworks write: files of other formats, and what tells how they fit together."""
