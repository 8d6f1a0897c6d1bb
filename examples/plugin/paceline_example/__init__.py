"""A drafter and a policy for paceline."""
