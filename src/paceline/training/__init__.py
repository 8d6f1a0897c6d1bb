"""Making drafters: data by self-distillation, objectives, and the trainer."""
