"""The engine side: the scheduler, the batches of one table, several tables on one device. Owns the networks."""
