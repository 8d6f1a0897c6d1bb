"""MTP: the layer for further tokens that many models are published with."""
