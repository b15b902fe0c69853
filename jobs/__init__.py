"""What people and schedulers start: command line, flow, cluster."""
