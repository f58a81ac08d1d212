"""Who is in the cluster: a pure view of heartbeats and the actor that keeps it."""
