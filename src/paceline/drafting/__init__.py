"""What every drafter is and shares: the contract, token trees, budgets, trained heads, corpora."""
