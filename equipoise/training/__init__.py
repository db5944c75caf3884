"""Local training of a client: the task, batches and gradient steps, and facts about the model that they need."""
