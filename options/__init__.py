"""What a run is made of: the schema, the loader and the registries."""
