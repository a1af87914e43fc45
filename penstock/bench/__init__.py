"""Load generators and measurements behind `penstock bench`."""
