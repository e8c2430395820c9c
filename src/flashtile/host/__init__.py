"""The machine a call runs on: processors, threads, versions of packages, addresses."""
