"""`mk tune`: the launches of a part searched by measurement, each checked before it counts."""
