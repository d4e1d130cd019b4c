"""For tests: Hypothesis strategies of boxes, meshes, layouts, topologies, and views; and `replay`, a slow
reference."""
