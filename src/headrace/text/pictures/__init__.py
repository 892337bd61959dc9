"""Pictures in prompts: decoded and cut in a process of their own (`sandbox`), by the rules of a model's family
(`forms`), and given their places in the prompt (`reading`)."""
