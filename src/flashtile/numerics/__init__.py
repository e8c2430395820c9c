"""The numerics of attention: dtypes, the online softmax, scores of a head, dropout, the order of tiles."""
