"""Training and scoring on a cluster whose engine starts the processes: Slurm, Spark or Ray."""
