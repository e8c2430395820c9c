"""The host machine: processors, threads, package versions, array addresses."""
