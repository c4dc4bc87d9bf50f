"""A LoRA adapter, as peft saves it, whose products are added to the weights of a model as they are loaded."""
