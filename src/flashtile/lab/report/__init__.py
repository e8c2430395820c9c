"""The page: records of studies and lessons -> one self-contained HTML file."""
