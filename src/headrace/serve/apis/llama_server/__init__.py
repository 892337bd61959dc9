"""llama-server's own routes: completion, infill, props, slots, templates."""
