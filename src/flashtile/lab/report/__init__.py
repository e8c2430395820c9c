"""The page: records of studies and lessons -> one HTML file that needs nothing else."""
