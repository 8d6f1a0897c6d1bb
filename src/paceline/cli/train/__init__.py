"""`paceline train`: makes drafters for a model."""
