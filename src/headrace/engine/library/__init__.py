"""Models of an engine: the folder they lie in, their facts and settings, and how one is loaded into a runner."""
