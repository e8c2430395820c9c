"""What attention computes with: dtypes, the online softmax, scores of a head, dropout, the order of tiles."""
