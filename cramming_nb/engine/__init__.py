"""What the method runs on: errors, options, files, jobs, hardware, checkpoints, several processes."""
