"""paceline inside other libraries."""
