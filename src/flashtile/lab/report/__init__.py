"""The page: records of studies, topics and lessons -> one HTML file that needs nothing else."""
