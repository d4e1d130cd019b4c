"""The algebra under everything: boxes, meshes, layouts, overlaps, views, and topologies."""
