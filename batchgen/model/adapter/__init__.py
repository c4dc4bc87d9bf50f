"""A LoRA adapter, as peft saves it; its products are added to the model's weights while they are loaded."""
