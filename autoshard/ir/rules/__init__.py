"""The placement rule table: how Replicate, Shard and Partial pass through every operator."""
