"""The search for the sublayers that a layer-skipping draft leaves out."""
