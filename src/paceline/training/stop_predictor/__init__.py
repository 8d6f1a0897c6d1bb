"""Training the predictors that stopping policies ask."""
