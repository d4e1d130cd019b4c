"""What the face is made of: calls and their errors, torch's protocol over our control plane, states and storages."""
