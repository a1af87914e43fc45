"""Several processes: world, placements, tensor-parallel and fully sharded layers, collectives, gradient buckets."""
