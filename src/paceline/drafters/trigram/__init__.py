"""ADED (Liu et al., 2024): a stored n-gram matrix, an adaptive layer over it, and a tree search that drafts."""
