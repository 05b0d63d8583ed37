"""Device meshes, sharding rules and layouts. Imports jax only."""
