"""The algebra under everything: boxes, meshes, placements, layouts, overlaps, and where bytes lie."""
